"""`longppo critic pretrain`: what is recorded is recorded once, what was learned is where training begins."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import rl.critic_pretrain
from rl.config import Config, ConfigError, CriticConfig, ExpertsConfig, KLConfig, PretrainConfig
from rl.config_rules import check
from rl.critic_pretrain import pretrain, record
from rl.model_rules import CRITIC_SETTINGS, CRITIC_WEIGHTS
from tests.test_critic import llama  # noqa: F401
from tests.test_critic_worker import TRAINED_ON, Worker, configured
from tests.test_learner import on_ranks


def written_and_read(rank, ranks, port, config, folder):
    """Values after three updates, and those of a fresh critic that reads what the first one wrote; then another trunk's
    complaint."""
    first = Worker(config, rank, ranks)
    first.setup("127.0.0.1", port)
    first.values(TRAINED_ON)
    for _ in range(3):
        first.update(TRAINED_ON, 1.0)
    learned = first.values(TRAINED_ON, True)
    first.export(folder)
    second = Worker(replace(config, critic=replace(config.critic, pretrained=folder)), rank, ranks)
    second.setup("127.0.0.1", port)
    read = second.values(TRAINED_ON)
    about = json.loads(Path(folder, CRITIC_SETTINGS).read_text())
    Path(folder, CRITIC_SETTINGS).write_text(json.dumps(about | {"trunk": about["trunk"] * 1.1}))
    try:
        second.build()
    except ConfigError as error:
        return learned, read, str(error)
    return learned, read, ""


def test_a_critic_begins_where_pretraining_ended(llama, tmp_path):  # noqa: F811
    config = configured(llama, 64, 1, freeze="encoder", experts=ExpertsConfig(blocks=1, count=4))
    ((learned, read, complaint),) = on_ranks(1, written_and_read, config, str(tmp_path / "critic"))
    assert any(np.abs(v).max() > 0 for v in learned)
    for a, b in zip(learned, read, strict=True):
        np.testing.assert_array_equal(a, b)
    assert complaint.startswith("critic.pretrained:")


@pytest.mark.parametrize(
    ("critic", "says"),
    [
        (CriticConfig(freeze="none"), "critic.freeze: 'none' given, must be encoder"),
        (CriticConfig(freeze="encoder", experts=ExpertsConfig(count=4)), "critic.experts.count: 4 given, must be 8"),
        (CriticConfig(freeze="encoder", pretrained="nowhere"), "critic.pretrained: 'nowhere' given, must be a folder"),
    ],
)
def test_a_folder_of_another_critic_is_refused_before_anything_starts(tiny_policy_dir, tmp_path, critic, says):
    (tmp_path / CRITIC_WEIGHTS).touch()
    experts = {"blocks": None, "count": 8, "top_k": 2, "intermediate_size": None, "upcycle": False}
    (tmp_path / CRITIC_SETTINGS).write_text(
        json.dumps({"freeze": "encoder", "trunk_layers": None, "first_trainable_layer": 0, "experts": experts})
    )
    config = Config()
    config.policy.path = str(tiny_policy_dir)
    config.critic = replace(critic, pretrained=critic.pretrained or str(tmp_path))
    with pytest.raises(ConfigError) as refused:
        check(config)
    assert str(refused.value).startswith(says)
    config.critic = CriticConfig(freeze="encoder", pretrained=str(tmp_path))
    check(config)


def halves(trajectories):
    """A return that a critic can tell from the first token."""
    return [float(t.response_ids[0] % 2) for t in trajectories]


def test_recording_goes_on_where_it_stopped(ray_session, tiny_policy_dir, tmp_path, monkeypatch):
    config = Config()
    config.policy.path = str(tiny_policy_dir)
    config.prompts.knobs, config.prompts.max_prompt_tokens = {"pairs": 10}, 128
    config.rollout.max_response_tokens = 4
    config.step.prompts_per_step, config.step.samples_per_prompt = 4, 1
    config.reward.function = "tests.test_critic_pretrain:halves"
    config.run.out = str(tmp_path)
    config.critic = CriticConfig(freeze="encoder", pretrain=PretrainConfig(prompts=8, held_out=4, epochs=2))
    config.algorithm.kl = KLConfig(where="reward", coefficient=0.1)  # of which an initial policy has none
    folder = pretrain(config)
    recorded = sorted((folder.parent / "recorded").glob("*.pkl"))
    before = [pickle.loads(file.read_bytes()) for file in recorded]
    assert [len(batch) for batch in before] == [4, 4, 4]
    curves = [json.loads(line) for line in (folder.parent / "metrics.jsonl").read_text().splitlines()]
    assert [c["step"] for c in curves] == [1, 2]
    assert all("critic/explained_variance" in c for c in curves)

    recorded[1].unlink()
    record(config, halves, folder.parent / "recorded")
    again = pickle.loads(recorded[1].read_bytes())
    assert [t.response_ids.tolist() for t in again] == [t.response_ids.tolist() for t in before[1]]

    def refuse(_):
        raise AssertionError("everything is recorded")

    monkeypatch.setattr(rl.critic_pretrain, "_engines", refuse)
    record(config, halves, folder.parent / "recorded")


def test_an_algorithm_without_a_critic_has_none_to_teach(tmp_path):
    config = Config()
    config.algorithm.name, config.run.out = "grpo", str(tmp_path)
    with pytest.raises(ConfigError, match=r"algorithm\.name: grpo given"):
        pretrain(config)
