"""The learner: one denominator whatever the split, on one rank and two, under every ZeRO stage."""

from __future__ import annotations

import multiprocessing as mp
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

from rl.config import ClusterConfig, DeepSpeedConfig, OptimizerConfig
from rl.learner import Learner, Stats, disable_dropout, free_port, init_process_group, token_stats
from rl.trajectory import Batch, Trajectory, shard


def trajectory(i: int, response: int) -> Trajectory:
    rng = np.random.default_rng(i)
    return Trajectory(
        prompt_index=i,
        sample_index=0,
        prompt_ids=rng.integers(0, 11, 3 + i % 3).astype(np.int32),
        response_ids=rng.integers(0, 11, response).astype(np.int32),
        action_mask=np.arange(response) % 3 != 1,
        rollout_logprobs=np.zeros(response, np.float32),
        finish_reason="stop",
        policy_version=0,
        advantages=rng.normal(size=response).astype(np.float32),
        loss_weight=0.05,
    )


UNEVEN = [trajectory(i, n) for i, n in enumerate([5, 1, 9, 2, 7, 3])]


class Toy(nn.Module):
    """Logits of the next token from the token alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.out = nn.Linear(8, 11)

    def forward(self, batch: Batch) -> torch.Tensor:
        logits = self.out(self.embed(batch.ids)[batch.predicts]).float()
        return logits.log_softmax(-1).gather(1, batch.targets[:, None]).squeeze(1)


def loss(module: nn.Module, batch: Batch) -> tuple[torch.Tensor, Stats]:
    logprobs = module(batch)
    per_token = -logprobs * batch.fields["advantages"]
    weighted = torch.where(batch.action_mask, per_token, 0.0) * batch.loss_weights
    return weighted.sum(), token_stats(batch.action_mask, {"loss": per_token})


def run(rank, ranks, port, ds, optimizer, tokens, updates):
    init_process_group(rank, ranks, "127.0.0.1", port, ClusterConfig())
    learner = Learner(Toy(), optimizer, ds, tokens)
    share = shard(UNEVEN, ranks)[rank]
    for _ in range(updates):
        stats, norm = learner.step(share, loss, 1.0)
    return {k: v.float().numpy() for k, v in learner.state_dict().items()}, stats, norm


def on_ranks(ranks, function, *args):
    """`function(rank, ranks, port, *args)` in one fresh process per rank."""
    with ProcessPoolExecutor(ranks, mp_context=mp.get_context("spawn")) as pool:
        port = free_port()
        return [f.result() for f in [pool.submit(function, rank, ranks, port, *args) for rank in range(ranks)]]


def learn(ds=None, optimizer=None, tokens=1000, ranks=1, updates=2):
    """Weights of rank 0 after some steps, all ranks' merged stats of the last, and its gradient norm."""
    results = on_ranks(ranks, run, ds or DeepSpeedConfig(), optimizer or OptimizerConfig(lr=0.05), tokens, updates)
    stats = Stats()
    for _, measured, _ in results:
        stats = stats.merge(measured)
    return results[0][0], stats, results[0][2]


@pytest.fixture(scope="module")
def whole():
    return learn()


@pytest.mark.parametrize(
    ("stage", "ranks", "tokens"),
    [(1, 1, 9), (2, 2, 9), (3, 2, 20), pytest.param(1, 2, 1, marks=pytest.mark.slow)],
)
def test_update_is_the_same_for_any_split(whole, stage, ranks, tokens):
    weights, stats, norm = learn(DeepSpeedConfig(zero_stage=stage, ranks=ranks), tokens=tokens, ranks=ranks)
    for name, w in whole[0].items():
        np.testing.assert_allclose(weights[name], w, atol=2e-6)
    assert norm == pytest.approx(whole[2], rel=1e-5)
    assert stats.means() == pytest.approx(whole[1].means(), rel=1e-6)
    assert stats.sums["tokens"] == sum(t.actions for t in UNEVEN)


def test_clipped_gradient_moves_the_weights_by_no_more():
    """Adam ignores the gradient's scale, so look at the norm that is reported before clipping."""
    _, _, free = learn(updates=1)
    _, _, clipped = learn(optimizer=OptimizerConfig(lr=0.05, max_grad_norm=free / 10), updates=1)
    assert clipped == pytest.approx(free, rel=1e-5)


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.w


def tiny_updates(rank, ranks, port):
    init_process_group(rank, ranks, "127.0.0.1", port, ClusterConfig())
    learner = Learner(One(), OptimizerConfig(lr=1e-6, betas=[0.0, 0.0]), DeepSpeedConfig(dtype="bf16"), 1000)
    for _ in range(1000):
        learner.step(UNEVEN[:1], lambda m, b: (m(b).float().sum(), Stats()), 1.0)
    return float(learner.engine.optimizer.fp32_groups_flat_partition[0][0]), float(learner.module.w)


def test_worked_value_15_small_updates_survive_in_the_master_copy():
    ((master, working),) = on_ranks(1, tiny_updates)
    assert round(master, 4) == 0.9990
    assert working == pytest.approx(0.9990, abs=2**-8)


def test_dropout_of_the_models_config_is_off():
    layer = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4))
    layer[1].attention_dropout = 0.3
    disable_dropout(layer)
    assert layer[0].p == 0.0
    assert layer[1].attention_dropout == 0.0


def test_stats_merge_like_the_whole():
    mask = torch.tensor([True, False, True, True])
    x = torch.tensor([1.0, float("nan"), 3.0, 5.0])
    whole = token_stats(mask, {"x": x}, {"lo": x}, {"hi": x})
    parts = token_stats(mask[:2], {"x": x[:2]}, {"lo": x[:2]}, {"hi": x[:2]}).merge(
        token_stats(mask[2:], {"x": x[2:]}, {"lo": x[2:]}, {"hi": x[2:]})
    )
    assert parts == whole
    assert whole.means() == {"x": 3.0, "lo": 1.0, "hi": 5.0}
