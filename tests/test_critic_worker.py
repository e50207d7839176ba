"""The critic under DeepSpeed: the same update for any split and any number of ranks, and what a checkpoint holds."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from critic.returns import first_returns
from critic.worker import CriticWorker
from rl.config import Config, DeepSpeedConfig, ExpertsConfig
from rl.trajectory import shard
from tests.test_critic import PACK, llama  # noqa: F401
from tests.test_learner import on_ranks

Worker: Any = CriticWorker.__ray_metadata__.modified_class
TRAINED_ON = [t for t in PACK if t.actions]


def configured(folder: str, tokens: int, ranks: int, **critic: Any) -> Config:
    config = Config()
    config.policy.path = folder
    config.step.tokens_per_microbatch = tokens
    config.critic.optimizer.lr = 1e-2
    config.critic.deepspeed = DeepSpeedConfig(ranks=ranks)
    config.critic.experts.balance_coefficient = 1.0
    for key, value in critic.items():
        setattr(config.critic, key, value)
    return config


def digest(tensors: Any) -> str:
    return hashlib.sha256(
        b"".join(t.detach().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)
    ).hexdigest()


def work(rank: int, ranks: int, port: int, config: Config, saved: str | None = None) -> dict[str, Any]:
    """A step of this rank: values, then three updates in two epochs, values again."""
    worker = Worker(config, rank, ranks)
    counts = worker.setup("127.0.0.1", port)
    trunk = worker.model.trunk
    share = shard(TRAINED_ON, ranks)[rank]
    frozen = digest(trunk.backbone.parameters())
    first = worker.values(share)
    results = [worker.update(share, 1.0) for _ in range(3)]
    forwards = trunk.forwards
    out = {
        "counts": counts,
        "keys": [t.prompt_index for t in share],
        "first": first,
        "weights": {k: v.float().numpy() for k, v in worker.learner.state_dict().items()},
        "stats": [stats for stats, _ in results],
        "norms": [norm for _, norm in results],
        "forwards": forwards,
        "frozen": digest(trunk.backbone.parameters()) == frozen,
        "held": sum(p.numel() for p in worker.model.parameters()),
        "dtypes": {str(p.dtype) for p in worker.model.parameters()},
    }
    if saved is not None:
        worker.save(saved)
        other = Worker(config, rank, ranks)
        other.setup("127.0.0.1", port)
        other.load(saved)
        # The next step's values and update, by the one that went on and by the one that came back.
        out["next"] = [(w.values(share), w.update(share, 1.0)[1]) for w in (worker, other)]
        out["scale"] = [float(x) for x in (other.model.head.centre, other.model.head.spread, other.model.head.observed)]
    return out


def test_an_update_of_the_frozen_critic_is_the_same_for_any_split(llama: str, tmp_path: Path) -> None:  # noqa: F811
    encoder = {"freeze": "encoder", "returns": "normalised"}
    (whole,) = on_ranks(1, work, configured(llama, 1000, 1, **encoder), str(tmp_path / "saved"))
    two = on_ranks(2, work, configured(llama, 20, 2, **encoder))
    for name, weights in whole["weights"].items():
        np.testing.assert_allclose(two[0]["weights"][name], weights, atol=2e-5, err_msg=name)
        np.testing.assert_array_equal(two[1]["weights"][name], two[0]["weights"][name], err_msg=name)
    for i in range(3):
        merged = two[0]["stats"][i].merge(two[1]["stats"][i]).means()
        assert merged == pytest.approx(whole["stats"][i].means(), rel=1e-3, abs=1e-5)
        assert two[0]["norms"][i] == pytest.approx(whole["norms"][i], rel=1e-3)
    # Each trajectory went through the trunk once, the frozen bytes stayed, the rest moved.
    assert whole["forwards"] == len(TRAINED_ON) == two[0]["forwards"] + two[1]["forwards"]
    assert whole["frozen"]
    assert two[0]["frozen"]
    assert whole["stats"][0].maxima["critic/weights_moved"] == 1.0
    assert whole["counts"]["parameters"] == whole["counts"]["frozen/trunk"] + whole["counts"]["trained"]
    assert whole["counts"]["trained"] == whole["counts"]["trained/experts"] + whole["counts"]["trained/head"]
    # A new head answers the mean return, and the scale comes back with the checkpoint.
    expected = first_returns(TRAINED_ON, 1.0)
    for v in (*whole["first"], *two[0]["first"]):
        np.testing.assert_allclose(v, expected.mean(), rtol=1e-5)
    (values, norm), (again, norm_again) = whole["next"]
    assert norm == norm_again
    for a, b in zip(values, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert whole["scale"] == pytest.approx([expected.mean(), expected.std(), 1.0], rel=1e-4)


def test_experts_on_other_ranks_answer_as_if_they_were_here(llama: str, tmp_path: Path) -> None:  # noqa: F811
    encoder = {"freeze": "encoder", "experts": ExpertsConfig(count=4), "returns": "normalised"}
    config = configured(llama, 20, 2, **encoder, expert_parallel_size=2)
    config.critic.deepspeed.zero_stage = 0
    alone = configured(llama, 1000, 1, **encoder)
    for c in (config, alone):
        c.critic.optimizer.max_grad_norm = 1e-2  # every step is clipped
    (whole,) = on_ranks(1, work, alone)
    two = on_ranks(2, work, config, str(tmp_path / "saved"))
    for rank in two:
        for name, weights in whole["weights"].items():
            np.testing.assert_allclose(rank["weights"][name], weights, atol=2e-5, err_msg=name)
        assert rank["norms"] == pytest.approx(whole["norms"], rel=1e-3)
        assert rank["counts"] == whole["counts"]
        (values, norm), (again, norm_again) = rank["next"]
        assert norm == norm_again
        for a, b in zip(values, again, strict=True):
            np.testing.assert_array_equal(a, b)
    for i in range(3):
        merged = two[0]["stats"][i].merge(two[1]["stats"][i]).means()
        assert merged == pytest.approx(whole["stats"][i].means(), rel=1e-3, abs=1e-5)
    # Each rank holds half of the experts: 2 blocks, of which an expert has 3 matrices of [64, 32].
    assert [rank["held"] for rank in two] == [whole["held"] - 2 * 2 * 3 * 64 * 32] * 2


def test_bf16_experts_train_in_float32_weights(llama: str) -> None:  # noqa: F811
    settings = DeepSpeedConfig(dtype="bf16")
    config = configured(llama, 1000, 1, freeze="encoder", deepspeed=settings, trunk_dtype="bf16")
    (result,) = on_ranks(1, work, config)
    assert result["dtypes"] == {"torch.float32"}
    losses = [stats.means()["critic/loss"] for stats in result["stats"]]
    assert losses[2] < losses[0]
