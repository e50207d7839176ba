"""A frozen encoder that is the KL reference's lower part: one forward gives states and reference log-probabilities."""

from __future__ import annotations

import pytest
import torch
from test_critic import PACK, folder, llama, model_of  # noqa: F401

import policy.model
from critic.model import build, parameter_counts
from rl.config import Config, CriticConfig, DeepSpeedConfig, KLConfig, LoraConfig, PolicyConfig
from rl.plan import plan, reference_alone, reference_in_critic, roles
from rl.trajectory import pack

TEMPERATURE = 0.7


@pytest.mark.parametrize("layers", [None, 4])
def test_one_forward_gives_what_trunk_and_reference_give_apart(folder: str, layers: int | None) -> None:  # noqa: F811
    critic = CriticConfig(trunk_layers=layers)
    shared, alone = build(critic, folder, reference_temperature=TEMPERATURE).trunk, build(critic, folder).trunk
    reference = policy.model.build(PolicyConfig(path=folder), TEMPERATURE).eval()
    assert shared is not None
    assert alone is not None
    batch = pack(PACK)
    with torch.no_grad():
        torch.testing.assert_close(shared.states(batch), alone.states(batch))
        torch.testing.assert_close(shared.reference_logprobs(batch), reference(batch)[0])
        some = pack(PACK[2:])
        torch.testing.assert_close(shared.reference_logprobs(some), reference(some)[0])
    assert shared.forwards == len(PACK)
    shared.new_step()
    shared.reference_logprobs(some)
    assert shared.forwards == len(PACK) + len(PACK[2:])


def test_states_that_were_not_kept_cost_no_second_pass_of_the_reference(llama: str) -> None:  # noqa: F811
    trunk = build(CriticConfig(cache_gib=0.0), llama, reference_temperature=1.0).trunk
    assert trunk is not None
    assert trunk.reference is not None
    batch = pack(PACK)
    first, logprobs = trunk.states(batch), trunk.reference_logprobs(batch)
    head = trunk.reference.lm.get_output_embeddings()
    head.weight.data.fill_(torch.nan)
    torch.testing.assert_close(trunk.states(batch), first)
    torch.testing.assert_close(trunk.reference_logprobs(batch), logprobs)
    assert trunk.forwards == 2 * len(PACK)


def test_what_only_the_reference_needs_is_counted_frozen(llama: str) -> None:  # noqa: F811
    counts = parameter_counts(build(CriticConfig(), llama, reference_temperature=1.0))
    whole = sum(p.numel() for p in policy.model.build(PolicyConfig(path=llama), 1.0).parameters())
    assert counts["frozen/trunk"] + counts["frozen/reference"] == whole
    assert "frozen/reference" not in parameter_counts(build(CriticConfig(), llama))


def configured(**critic: object) -> Config:
    config = Config()
    config.algorithm.kl = KLConfig(where="loss")
    config.policy.path = "somewhere"
    config.critic = CriticConfig(**critic)  # type: ignore[arg-type]
    return config


def test_the_reference_is_placed_alone_only_where_nobody_else_holds_it() -> None:
    config = configured()
    assert reference_in_critic(config)
    assert not reference_alone(config)
    assert [role.name for role in roles(config)] == ["rollout", "policy", "critic"]
    assert plan(config).splitlines()[-1].split() == ["reference", "in", "the", "critic's", "forward"]
    for other in (
        configured(freeze="none"),
        configured(freeze="attention"),
        configured(path="another"),
        configured(trunk_dtype="bf16"),
    ):
        assert reference_alone(other)
        assert not reference_in_critic(other)
        assert "reference" in [role.name for role in roles(other)]
    assert reference_in_critic(configured(path="somewhere"))


def test_a_bf16_policy_has_a_bf16_reference() -> None:
    config = configured(trunk_dtype="bf16")
    config.policy.deepspeed = DeepSpeedConfig(dtype="bf16")
    assert reference_in_critic(config)


def test_lora_without_a_shared_forward_is_its_own_reference() -> None:
    config = configured(freeze="none")
    config.policy.lora = LoraConfig(rank=4)
    assert not reference_alone(config)
    assert not reference_in_critic(config)


@pytest.mark.parametrize(("name", "where"), [("grpo", "loss"), ("ppo", "none")])
def test_without_critic_or_kl_there_is_nothing_to_share(name: str, where: str) -> None:
    config = configured()
    config.algorithm.name, config.algorithm.kl.where = name, where
    assert not reference_in_critic(config)
    assert reference_alone(config) == (where != "none")
