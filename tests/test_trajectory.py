"""Packing, micro-batches, shards: no token is lost, moved or mixed; worked value 4 of the semantics."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl import losses
from rl.logprobs import logprobs_and_entropy
from rl.trajectory import PER_TOKEN, Trajectory, microbatches, pack, shard, with_arrays

VOCAB = 8


def trajectory(prompt_ids, response_ids, mask=None, index=0, **fields):
    n = len(response_ids)
    return Trajectory(
        prompt_index=index,
        sample_index=0,
        prompt_ids=np.array(prompt_ids, np.int32),
        response_ids=np.array(response_ids, np.int32),
        action_mask=np.array([True] * n if mask is None else mask, bool),
        rollout_logprobs=fields.pop("rollout_logprobs", np.zeros(n, np.float32)),
        finish_reason="stop",
        policy_version=0,
        **fields,
    )


@st.composite
def steps(draw, min_size=1, max_size=6):
    """Trajectories of a step: every per-token field set, uneven lengths, empty responses, observations."""
    count = draw(st.integers(min_size, max_size))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    out = []
    for index in range(count):
        p, r = draw(st.integers(1, 6)), draw(st.integers(0, 6))
        t = trajectory(
            rng.integers(0, VOCAB, p),
            rng.integers(0, VOCAB, r),
            rng.random(r) < 0.7,
            index,
            values=rng.normal(size=r + 1).astype(np.float32),
        )
        out.append(replace(t, **{name: rng.normal(size=r).astype(np.float32) for name in PER_TOKEN}))
    return out


def same(a, b):
    """Whether two lists hold the very same trajectories in the same order."""
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


@given(steps())
def test_a_pack_keeps_every_token_in_order(step):
    batch = pack(step)
    ids = torch.cat([torch.from_numpy(np.concatenate([t.prompt_ids, t.response_ids])) for t in step])
    assert torch.equal(batch.ids, ids.long())
    assert torch.equal(batch.targets, batch.ids[batch.predicts + 1])  # each is predicted by the token before it
    assert len(batch.targets) == sum(len(t.response_ids) for t in step)
    assert len(batch.last) == len(step)
    per_trajectory = [len(t.response_ids) for t in step]
    for i, t in enumerate(step):
        assert batch.last[i] + 1 == sum(x.tokens for x in step[: i + 1])
        mine = batch.trajectory == i
        np.testing.assert_array_equal(batch.action_mask[mine], t.action_mask)
        np.testing.assert_array_equal(batch.fields["values"][mine], t.values[:-1])
        for name in PER_TOKEN:
            np.testing.assert_array_equal(batch.fields[name][mine], getattr(t, name))
            np.testing.assert_array_equal(batch.fields[name].split(per_trajectory)[i], getattr(t, name))


@given(steps())
def test_no_token_looks_into_another_trajectory(step):
    batch = pack(step)
    owner = torch.cat([torch.full((t.tokens,), i) for i, t in enumerate(step)])
    positions = torch.arange(len(owner))
    assert torch.equal(owner[batch.seq_start], owner)
    assert torch.equal(batch.position_ids, positions - batch.seq_start)
    assert torch.equal(owner[batch.predicts], batch.trajectory)
    assert ((batch.seq_start == positions) == (batch.position_ids == 0)).all()


@given(steps(), st.integers(1, 40))
def test_microbatches_keep_order_and_budget(step, budget):
    batches = microbatches(step, budget)
    assert same([t for b in batches for t in b], step)
    assert all(b and (len(b) == 1 or sum(t.tokens for t in b) <= budget) for b in batches)
    # None is cut short: the next trajectory would not have fitted.
    for b, following in pairwise(batches):
        assert sum(t.tokens for t in b) + following[0].tokens > budget


def test_a_trajectory_over_the_budget_is_a_microbatch_of_its_own():
    step = [trajectory([1], [2] * n) for n in (1, 9, 1, 1)]
    assert [[t.tokens for t in b] for b in microbatches(step, 4)] == [[2], [10], [2, 2]]
    assert microbatches([], 4) == []


@given(steps(min_size=0), st.integers(1, 4))
def test_shards_lose_nothing_and_are_even(step, ranks):
    shards = shard(step, ranks)
    assert len(shards) == ranks
    assert sorted(t.prompt_index for s in shards for t in s) == [t.prompt_index for t in step]
    loads = [sum(t.tokens for t in s) for s in shards]
    assert max(loads) - min(loads) <= max((t.tokens for t in step), default=0)
    if len(step) >= ranks:
        assert all(shards)
    assert all(same(a, b) for a, b in zip(shards, shard(step, ranks), strict=True))


def test_the_longest_are_placed_first():
    step = [trajectory([1], [2] * (n - 1)) for n in (1, 1, 1, 3)]
    assert [[t.tokens for t in s] for s in shard(step, 2)] == [[3], [1, 1, 1]]


@given(steps())
def test_with_arrays_pairs_in_order(step):
    arrays = [np.full(len(t.response_ids), i, np.float32) for i, t in enumerate(step)]
    for i, t in enumerate(with_arrays(step, old_logprobs=arrays, advantages=arrays)):
        assert t.prompt_index == i
        assert t.old_logprobs is t.advantages is arrays[i]
    with pytest.raises(ValueError, match="zip"):
        with_arrays(step, old_logprobs=arrays[:-1])


def test_what_pack_refuses():
    with pytest.raises(ValueError, match="at least one trajectory"):
        pack([])
    with pytest.raises(ValueError, match=r"prompt 7, sample 0\): empty prompt"):
        pack([trajectory([1], [2]), trajectory([], [3], index=7)])
    with pytest.raises(ValueError, match="advantages has 1 entries, must have 2"):
        pack([trajectory([1], [2, 3], advantages=np.zeros(1, np.float32))])
    with pytest.raises(ValueError, match="token_rewards has 3 entries, must have 2"):
        pack([trajectory([1], [2, 3], token_rewards=np.zeros(3, np.float32))])
    with pytest.raises(ValueError, match="values has 2 entries, must have 3"):
        pack([trajectory([1], [2, 3], values=np.zeros(2, np.float32))])
    # Dropped for all, the policy loss would take itself for on-policy.
    with pytest.raises(ValueError, match="old_logprobs: only 1 of 2"):
        pack([trajectory([1], [2]), trajectory([1], [2], old_logprobs=np.zeros(1, np.float32))])


def test_a_field_that_nobody_has_is_absent():
    assert set(pack([trajectory([1], [2])]).fields) == {"rollout_logprobs"}


def test_a_pack_of_empty_responses():
    batch = pack([trajectory([1, 2], []), trajectory([3], [])])
    assert batch.ids.tolist() == [1, 2, 3]
    assert batch.last.tolist() == [1, 2]
    assert len(batch.predicts) == len(batch.targets) == len(batch.trajectory) == 0


def test_worked_value_4_each_token_is_scored_by_the_one_before_it():
    table = torch.full((VOCAB, VOCAB), 0.1 / (VOCAB - 1))
    table[torch.arange(VOCAB), (torch.arange(VOCAB) + 1) % VOCAB] = 0.9
    # Another trajectory in front: the pack's boundary is part of the question.
    batch = pack([trajectory([1], [6]), trajectory([3, 4], [5, 6])])
    hidden = torch.eye(VOCAB)[batch.ids][batch.predicts]
    logprobs, _ = logprobs_and_entropy(hidden, table.log().t(), batch.targets, 1.0, 2)
    assert logprobs[1:].tolist() == pytest.approx([-0.1054, -0.1054], abs=5e-5)


AGGREGATIONS = ["token_mean", "sequence_mean", "constant"]


@given(steps(), st.integers(1, 40), st.integers(1, 3), st.sampled_from(AGGREGATIONS), st.sampled_from(["clip", "dis"]))
def test_the_gradient_is_the_same_for_any_split(step, budget, ranks, aggregation, kind):
    """Micro-batches of any size, on any number of ranks, of a small model with policy, value, KL and entropy terms."""
    weights = losses.loss_weights([t.actions for t in step], aggregation, max_response_tokens=6)
    step = [replace(t, loss_weight=w) for t, w in zip(step, weights, strict=True)]
    g = torch.Generator().manual_seed(0)
    start = [torch.randn(VOCAB, 5, generator=g, dtype=torch.float64) for _ in range(2)]

    def share(parts, embedding, head):
        batch = pack(parts)
        f, mask = batch.fields, batch.action_mask
        hidden = embedding[batch.ids][batch.predicts]
        logprobs, entropy = logprobs_and_entropy(hidden, head, batch.targets, 0.8, 4)
        if kind == "clip":
            policy = losses.clip_policy_loss(
                logprobs, f["old_logprobs"], f["advantages"], mask, clip_low=0.2, clip_high=0.3, dual_clip=3.0
            )
        else:
            policy = losses.dis_policy_loss(logprobs, f["rollout_logprobs"], f["advantages"], mask, low=0.8, high=3.0)
        per_token = policy.loss - 0.01 * entropy
        per_token = per_token + 0.1 * losses.kl_loss(logprobs, f["reference_logprobs"], mask, "k2")
        per_token = per_token + losses.value_loss(hidden.sum(-1), f["values"], f["value_targets"], mask, clip=0.2)
        return losses.total(per_token, mask, batch.loss_weights)

    def gradients(batches):
        parameters = [x.clone().requires_grad_() for x in start]
        for parts in batches:
            share(parts, *parameters).backward()
        return [x.grad for x in parameters]

    split = [b for s in shard(step, ranks) for b in microbatches(s, budget)]
    torch.testing.assert_close(gradients(split), gradients([step]), rtol=1e-9, atol=1e-9)
