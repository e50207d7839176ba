"""Losses against their textbook forms, worked values 8 and 10 of the semantics, masks, and one denominator."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl import losses

NAN, INF = math.nan, math.inf


def t(*x):
    return torch.tensor(x, dtype=torch.float64)


def every(x):
    return torch.ones_like(x, dtype=torch.bool)


def gradient(loss, x):
    return torch.autograd.grad(loss.sum(), x)[0]


def random_tokens(seed, n=64):
    """logprobs (with gradient), old log-probs, advantages: ratios on every side of every bound."""
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(n, generator=g, dtype=torch.float64) * 3 - 1e-3
    logprobs = old + torch.randn(n, generator=g, dtype=torch.float64)
    return logprobs.requires_grad_(), old, torch.randn(n, generator=g, dtype=torch.float64)


# Policy losses


@pytest.mark.parametrize("seed", range(5))
def test_clip_is_the_minimum_of_both_surrogates(seed):
    logprobs, old, a = random_tokens(seed)
    got = losses.clip_policy_loss(logprobs, old, a, every(a), clip_low=0.2, clip_high=0.28, dual_clip=None)
    ratio = (logprobs - old).exp()
    expected = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)
    torch.testing.assert_close(got.loss, expected)
    slope = gradient(expected, logprobs)
    torch.testing.assert_close(gradient(got.loss, logprobs), slope)
    torch.testing.assert_close(got.ratio, ratio.detach())
    # Clipped are exactly the tokens without gradient.
    assert torch.equal(got.clipped_low | got.clipped_high, slope == 0)


def test_clip_bounds_are_separate():
    ratio, a = t(0.7, 0.75, 1.25, 1.45), t(-1, -1, 1, 1)
    got = losses.clip_policy_loss(ratio.log(), t(0, 0, 0, 0), a, every(a), clip_low=0.28, clip_high=0.4, dual_clip=None)
    torch.testing.assert_close(got.loss, t(0.72, 0.75, -1.25, -1.4))
    assert got.clipped_low.tolist() == [True, False, False, False]
    assert got.clipped_high.tolist() == [False, False, False, True]


def test_dual_clip_bounds_the_loss_of_a_negative_advantage():
    logprobs = t(math.log(2.9), math.log(5), math.log(5)).requires_grad_()
    a = t(-2, -2, 2)
    got = losses.clip_policy_loss(logprobs, t(0, 0, 0), a, every(a), clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    torch.testing.assert_close(got.loss, t(5.8, 6, -2.4))
    torch.testing.assert_close(gradient(got.loss, logprobs), t(5.8, 0, 0))
    assert got.clipped_high.tolist() == [False, True, True]
    with pytest.raises(ValueError, match=r"dual_clip: 1\.0 given, must be above 1"):
        losses.clip_policy_loss(logprobs, a, a, every(a), clip_low=0.2, clip_high=0.2, dual_clip=1.0)


def test_on_policy_the_ratio_is_1_and_the_gradient_is_the_advantages():
    logprobs, _, a = random_tokens(0)
    got = losses.clip_policy_loss(logprobs, logprobs.detach(), a, every(a), clip_low=0.2, clip_high=0.2, dual_clip=None)
    assert torch.equal(got.ratio, torch.ones_like(a))
    assert not (got.clipped_low | got.clipped_high).any()
    torch.testing.assert_close(gradient(got.loss, logprobs), -a)


def test_dis_counts_inside_and_is_0_outside():
    ratio = t(0.19, 0.21, 1, 3.9, 4.1)
    logprobs, a = ratio.log().requires_grad_(), t(1, 1, -1, 1, -1)
    got = losses.dis_policy_loss(logprobs, torch.zeros_like(a), a, every(a), low=0.8, high=3.0)
    torch.testing.assert_close(got.loss, t(0, -0.21, 1, -3.9, 0))
    torch.testing.assert_close(gradient(got.loss, logprobs), t(0, -0.21, 1, -3.9, 0))  # through r
    assert got.clipped_low.tolist() == [True, False, False, False, False]
    assert got.clipped_high.tolist() == [False, False, False, False, True]
    weights = torch.full_like(a, losses.loss_weights([5], "token_mean", max_response_tokens=8)[0])
    torch.testing.assert_close(losses.total(got.loss, every(a), weights), t(-3.11 / 5)[0])


@pytest.mark.parametrize("kind", ["clip", "dis"])
def test_a_ratio_that_overflows_gives_no_nan_where_it_is_clipped(kind):
    logprobs = torch.zeros(2, requires_grad=True)
    rollout, a = torch.tensor([-200.0, 0.0]), torch.ones(2)
    if kind == "clip":
        got = losses.clip_policy_loss(logprobs, rollout, a, every(a), clip_low=0.2, clip_high=0.2, dual_clip=None)
    else:
        got = losses.dis_policy_loss(logprobs, rollout, a, every(a), low=0.8, high=3.0)
    assert torch.isfinite(got.loss).all()
    assert gradient(got.loss, logprobs).tolist() == [0, -1]


def test_importance_weights_are_truncated_and_carry_no_gradient():
    trainer = t(math.log(0.5), math.log(3), NAN).requires_grad_()
    got = losses.importance_weights(trainer, t(0, 0, 0), torch.tensor([True, True, False]), cap=2.0)
    torch.testing.assert_close(got, t(0.5, 2, 1))
    assert not got.requires_grad


# Value loss


@pytest.mark.parametrize(("value", "old", "target", "loss", "grad"), [(1, 0, 0.5, 0.125, 0.5), (0.5, 0, 1, 0.32, 0)])
def test_worked_value_10_value_clip(value, old, target, loss, grad):
    v = t(value).requires_grad_()
    got = losses.value_loss(v, t(old), t(target), every(v), clip=0.2)
    torch.testing.assert_close(got, t(loss))
    torch.testing.assert_close(gradient(got, v), t(grad))


def test_value_loss_without_clip_is_half_the_squared_error():
    v = t(0.5).requires_grad_()
    got = losses.value_loss(v, t(0), t(1), every(v), clip=None)
    assert got.item() == 0.125
    assert gradient(got, v).item() == -0.5


# KL


def test_worked_value_8_kl_estimates():
    log_p = t(-1).requires_grad_()
    got = [losses.kl_estimate(log_p, t(-1.5), kind) for kind in ("k1", "k2", "k3")]
    assert [x.item() for x in got] == pytest.approx([0.5, 0.125, 0.1065], abs=5e-5)
    assert gradient(got[2], log_p).item() == pytest.approx(0.3935, abs=5e-5)


def test_k3_keeps_small_differences():
    d = torch.tensor([1e-4], dtype=torch.float32)
    assert losses.kl_estimate(d, torch.zeros(1), "k3").item() == pytest.approx(5e-9, rel=2e-2)


def test_kl_loss_is_k2_or_k3():
    p, q = random_tokens(0)[:2]
    for kind in ("k2", "k3"):
        torch.testing.assert_close(losses.kl_loss(p, q, every(q), kind), losses.kl_estimate(p, q, kind))
    with pytest.raises(ValueError, match="'k1' given, in the loss its expected gradient is zero"):
        losses.kl_loss(p, q, every(q), "k1")
    with pytest.raises(ValueError, match="'kl' given, allowed: k1, k2, k3"):
        losses.kl_loss(p, q, every(q), "kl")


def test_what_the_estimators_gradients_are_worth_on_policy():
    """The reason for k2 and against k1: expectations over the policy, exact by enumeration."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=g, dtype=torch.float64).requires_grad_()
    log_q = torch.randn(6, generator=g, dtype=torch.float64).log_softmax(0)
    log_p = logits.log_softmax(0)
    p = log_p.detach().exp()
    reverse_kl = gradient(log_p.exp() * (log_p - log_q), logits)

    def expected(kind):
        return gradient(p * losses.kl_estimate(logits.log_softmax(0), log_q, kind), logits)

    torch.testing.assert_close(expected("k2"), reverse_kl)
    torch.testing.assert_close(expected("k1"), torch.zeros_like(p))
    assert (expected("k3") - reverse_kl).abs().max() > 0.01


def test_mismatch():
    rollout, trainer = t(-1, -1, -1, NAN), t(-1.5, -1 + math.log(2.1), -1 - math.log(2.1), INF)
    got = losses.mismatch_tokens(rollout, trainer, torch.tensor([True, True, True, False]))
    assert got.k3[0].item() == pytest.approx(0.1065, abs=5e-5)  # p is the rollout
    torch.testing.assert_close(got.abs_difference, t(0.5, math.log(2.1), math.log(2.1), 0))
    assert got.outside.tolist() == [False, True, True, False]
    assert got.k3[3] == 0


# Masks


def _clip(logprobs, other, advantages, mask):
    return losses.clip_policy_loss(logprobs, other, advantages, mask, clip_low=0.2, clip_high=0.2, dual_clip=3.0).loss


def _dis(logprobs, other, advantages, mask):
    return losses.dis_policy_loss(logprobs, other, advantages, mask, low=0.8, high=3.0).loss


def _kl(kind):
    return lambda logprobs, other, advantages, mask: losses.kl_loss(logprobs, other, mask, kind)


def _value(logprobs, other, advantages, mask):
    return losses.value_loss(logprobs, other, advantages, mask, clip=0.2)


def _plain(logprobs, other, advantages, mask):
    return logprobs


@pytest.mark.parametrize("function", [_clip, _dis, _kl("k2"), _kl("k3"), _value, _plain])
@pytest.mark.parametrize("junk", [NAN, INF, -INF, 1e30])
def test_nothing_outside_the_mask_touches_loss_or_gradient(function, junk):
    logprobs, other, advantages = random_tokens(1)
    n = len(other)
    mask = torch.arange(n) % 3 != 0
    weights = torch.full((n,), 0.01, dtype=torch.float64)

    def loss_and_gradient(*tensors):
        x, y, z, w = tensors
        x = x.detach().requires_grad_()
        loss = losses.total(function(x, y, z, mask), mask, w)
        return loss.detach(), gradient(loss, x)

    inputs = [logprobs.detach(), other, advantages, weights]
    clean = loss_and_gradient(*inputs)
    dirty = loss_and_gradient(*(torch.where(mask, x, junk) for x in inputs))
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1], dirty[1])
    assert not dirty[1][~mask].any()


def test_an_all_false_mask_gives_a_loss_of_0_with_a_gradient():
    x = t(NAN, INF).requires_grad_()
    loss = losses.total(x, torch.zeros(2, dtype=torch.bool), t(1, 1))
    assert loss.item() == 0
    assert gradient(loss, x).tolist() == [0, 0]


# One denominator


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(0, 1000))
def test_weights_are_the_aggregations_they_are_named_for(counts, seed):
    g = torch.Generator().manual_seed(seed)
    tokens = [torch.randn(n, generator=g, dtype=torch.float64) for n in counts]

    def weighted(aggregation):
        weights = losses.loss_weights(counts, aggregation, max_response_tokens=7)
        return sum(float((w * x).sum()) for w, x in zip(weights, tokens, strict=True))

    flat, nonempty = torch.cat(tokens), [x for x in tokens if len(x)]
    token_mean = float(flat.mean()) if len(flat) else 0.0
    sequence_mean = float(torch.stack([x.mean() for x in nonempty]).mean()) if nonempty else 0.0
    assert weighted("token_mean") == pytest.approx(token_mean)
    assert weighted("sequence_mean") == pytest.approx(sequence_mean)
    assert weighted("constant") == pytest.approx(float(flat.sum()) / (len(counts) * 7))


def test_an_unknown_aggregation_is_refused():
    with pytest.raises(ValueError, match="'mean' given, allowed: token_mean, sequence_mean, constant"):
        losses.loss_weights([1], "mean", max_response_tokens=1)
