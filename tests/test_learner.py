"""The learner: one denominator whatever the split, on one rank and two, under every ZeRO stage."""

from __future__ import annotations

import multiprocessing as mp
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from rl.config import (
    AlgorithmConfig,
    ClusterConfig,
    CriticConfig,
    DeepSpeedConfig,
    OptimizerConfig,
    PolicyConfig,
)
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
    [(0, 2, 9), (1, 1, 9), (2, 2, 9), (3, 2, 20), pytest.param(1, 2, 1, marks=pytest.mark.slow)],
)
def test_update_is_the_same_for_any_split(whole, stage, ranks, tokens):
    weights, stats, norm = learn(DeepSpeedConfig(zero_stage=stage, ranks=ranks), tokens=tokens, ranks=ranks)
    for name, w in whole[0].items():
        np.testing.assert_allclose(weights[name], w, atol=2e-6)
    assert norm == pytest.approx(whole[2], rel=1e-5)
    assert stats.means() == pytest.approx(whole[1].means(), rel=1e-6)
    assert stats.sums["tokens"] == sum(t.actions for t in UNEVEN)


def real_gradients(rank, ranks, port, path, cases):
    """One optimizer step over `UNEVEN` for each (role, deepspeed, tokens): every parameter's gradient, and the stats.

    Adam's first moment after one step is the gradient times 1 - beta; its update itself would hide the gradient's size.
    """
    from deepspeed.utils import safe_get_full_optimizer_state

    init_process_group(rank, ranks, "127.0.0.1", port, ClusterConfig())
    results = []
    for role, ds, tokens in cases:
        torch.manual_seed(0)
        module, loss = real_policy(path) if role == "policy" else real_critic(path)
        learner = Learner(module, OptimizerConfig(lr=1e-6, betas=[0.5, 0.9], max_grad_norm=1e9), ds, tokens)
        stats, _ = learner.step(shard(UNEVEN, ranks)[rank], loss, 1.0)
        trained = [(name, p) for name, p in learner.module.named_parameters() if p.requires_grad]
        moments = {name: safe_get_full_optimizer_state(p, "exp_avg") for name, p in trained}
        results.append(({name: 2 * m.float().numpy() for name, m in moments.items()}, stats))
    return results


def real_policy(path):
    from policy.model import build
    from policy.worker import policy_loss

    config = AlgorithmConfig()
    return build(PolicyConfig(path=path), 1.0), lambda module, batch: policy_loss(config, batch, *module(batch))


def real_critic(path):
    from critic.model import build

    def loss(module, batch):
        values, *_ = module(batch)
        squares = (values - batch.fields["advantages"]) ** 2
        return (squares * batch.action_mask * batch.loss_weights).sum(), token_stats(batch.action_mask, {"l": squares})

    module = build(CriticConfig(freeze="none"), path)
    nn.init.normal_(module.head.weight)  # at zero, where it starts, the backbone has no gradient
    return module, loss


def test_the_real_models_gradients_are_the_same_for_any_split(tiny_policy_dir):
    """One rank with everything in one pack, against two gloo ranks under ZeRO 2 and 3 with small micro-batches."""
    path, roles = str(tiny_policy_dir), ("policy", "critic")
    splits = [(2, 1), (3, 12)]
    (whole,) = on_ranks(1, real_gradients, path, [(role, DeepSpeedConfig(), 1000) for role in roles])
    cases = [(role, DeepSpeedConfig(zero_stage=z, ranks=2), n) for role in roles for z, n in splits]
    first, second = on_ranks(2, real_gradients, path, cases)
    for i, (gradients, stats) in enumerate(first):
        expected, expected_stats = whole[i // len(splits)]
        largest = max(np.abs(g).max() for g in expected.values())
        assert sum(np.abs(g).max() > 1e-3 * largest for g in expected.values()) > 20
        assert gradients.keys() == expected.keys()
        for name, g in expected.items():
            np.testing.assert_allclose(gradients[name], g, atol=1e-5 * largest, err_msg=str((cases[i], name)))
        assert stats.merge(second[i][1]).means() == pytest.approx(expected_stats.means(), rel=1e-4, abs=1e-6)


class Counted(Toy):
    passes = 0

    def forward(self, batch: Batch) -> torch.Tensor:
        self.passes += 1
        return super().forward(batch)


ANNOUNCED = {
    "one pack": (1000, 6, 2),  # the step's own pass is the first one; the other comes after the step
    "six packs": (9, 6, 18),  # are not kept
    "another step": (1000, 5, 3),  # than the one announced
}
"""Tokens of a micro-batch, trajectories of the step, passes that both together cost with the one after."""


def announced_steps(rank, ranks, port):
    """A pass over all trajectories, then the step over some in another order: what came of it, announced and not."""
    init_process_group(rank, ranks, "127.0.0.1", port, ClusterConfig())
    before = [replace(t, advantages=None) for t in UNEVEN]
    results = {}
    for name, (tokens, scored, _) in ANNOUNCED.items():
        for then_step in (True, False):
            learner = Learner(Counted(), OptimizerConfig(lr=0.05), DeepSpeedConfig(), tokens)
            seen = learner.forward(before, lambda m, b: m(b).numpy(), then_step=then_step)
            stats, norm = learner.step(UNEVEN[:scored][::-1], loss, 1.0)
            again = learner.forward(UNEVEN, lambda m, b: m(b).numpy())
            weights = [v.numpy() for v in learner.state_dict().values()]
            arrays = [np.concatenate(seen), np.concatenate(again), *weights]
            results[name, then_step] = stats.means() | {"norm": norm}, arrays, learner.module.passes
    return results


def test_a_pass_that_the_step_repeats_is_computed_once():
    (results,) = on_ranks(1, announced_steps)
    for name, (_, _, passes) in ANNOUNCED.items():
        metrics, arrays, count = results[name, True]
        plain_metrics, plain_arrays, _ = results[name, False]
        assert count == passes, name
        assert metrics == pytest.approx(plain_metrics, rel=1e-6)
        for a, b in zip(arrays, plain_arrays, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-6)


def clipped_steps(rank, ranks, port):
    """At stages 0 and 1: the norm that is reported, and that of the first moments, which the clipped gradient made."""
    from deepspeed.utils import safe_get_full_optimizer_state

    init_process_group(rank, ranks, "127.0.0.1", port, ClusterConfig())
    found = {}
    for stage in (0, 1):
        optimizer = OptimizerConfig(betas=[0.5, 0.9], max_grad_norm=1e-3)
        learner = Learner(Toy(), optimizer, DeepSpeedConfig(zero_stage=stage), 1000)
        _, norm = learner.step(UNEVEN, loss, 1.0)
        state = learner.engine.optimizer.state
        parameters = list(learner.module.parameters())
        moments = [safe_get_full_optimizer_state(p, "exp_avg") if stage else state[p]["exp_avg"] for p in parameters]
        found[stage] = norm, float(torch.cat([m.flatten() for m in moments]).norm()) / 0.5
    return found


def test_a_gradient_is_clipped_after_its_norm_is_reported():
    _, _, free = learn(updates=1)
    (found,) = on_ranks(1, clipped_steps)
    for norm, applied in found.values():
        assert norm == pytest.approx(free, rel=1e-5)
        assert applied == pytest.approx(1e-3, rel=1e-3)


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
