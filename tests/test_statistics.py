"""The statistics of a comparison against slow, obvious references, and how often they cry wolf."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.statistics import (
    SEEDS_FOR_A_CLAIM,
    common_threshold,
    difference_interval,
    first_reaching,
    holm,
    iqm,
    iqm_interval,
    paired_p,
    permutation_p,
)


def slow_iqm(values):
    """Sort, drop a quarter on each side, average what is left."""
    left = sorted(values)
    for _ in range(len(values) // 4):
        left = left[1:-1]
    return sum(left) / len(left)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=23))
def test_interquartile_mean(values):
    assert float(iqm(np.array(values))) == pytest.approx(slow_iqm(values), abs=1e-9)


def quantiles(values):
    return np.quantile(values, [0.025, 0.975])


def test_the_interval_is_that_of_every_possible_resample():
    values = [0.1, 0.4, 0.5, 0.9, 0.2]
    every = [slow_iqm(drawn) for drawn in itertools.product(values, repeat=len(values))]
    assert iqm_interval(np.array(values)) == pytest.approx(quantiles(every), abs=0.011)


def test_a_difference_is_resampled_within_each_arm():
    a, b = [0.1, 0.4, 0.9], [0.5, 0.7, 1.4, 0.6]
    means = [[slow_iqm(drawn) for drawn in itertools.product(arm, repeat=len(arm))] for arm in (a, b)]
    every = [x - y for x, y in itertools.product(*means)]
    assert difference_interval(np.array(a), np.array(b)) == pytest.approx(quantiles(every), abs=0.02)


def test_one_seed_has_no_interval_and_equal_seeds_have_an_empty_one():
    assert iqm_interval(np.array([0.5])) is None
    assert difference_interval(np.array([0.5, 0.6]), np.array([0.5])) is None
    assert iqm_interval(np.array([0.5, 0.5, 0.5])) == (0.5, 0.5)


@pytest.mark.parametrize("tied", [False, True])
def test_permutation_p_is_exact_where_all_assignments_can_be_listed(tied):
    rng = random.Random(1)
    a, b = ([round(rng.random() + shift, 1 if tied else 9) for _ in range(5)] for shift in (0.0, 0.3))
    pooled, observed, extreme, assignments = a + b, abs(slow_iqm(a) - slow_iqm(b)), [0, 0], 0
    for chosen in itertools.combinations(range(10), 5):
        x = slow_iqm([pooled[i] for i in chosen]) - slow_iqm([pooled[i] for i in range(10) if i not in chosen])
        extreme[0] += x >= observed - 1e-9
        extreme[1] += x <= -observed + 1e-9
        assignments += 1
    expected = min(1.0, 2 * min(extreme) / assignments)
    assert float(permutation_p(np.array(a), np.array(b))) == pytest.approx(expected, abs=1e-9)


DISTRIBUTIONS = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "success of 64 prompts": lambda rng, shape: rng.binomial(64, 0.4, size=shape) / 64,
    "some seeds collapse": lambda rng, shape: rng.normal(size=shape) - 8.0 * (rng.random(shape) < 0.2),
}


@pytest.mark.parametrize("draw", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_two_identical_arms_are_told_apart_in_one_of_twenty_comparisons(draw):
    """1,000 comparisons of ten against ten seeds; .05 plus or minus three standard errors, ties make it rarer."""
    rng = np.random.default_rng(0)
    a, b = draw(rng, (1000, SEEDS_FOR_A_CLAIM)), draw(rng, (1000, SEEDS_FOR_A_CLAIM))
    alarms = np.mean(permutation_p(a, b, resamples=399) < 0.05)
    assert 0.025 < alarms < 0.071


def test_arms_that_differ_are_told_apart():
    a, b = np.random.default_rng(0).normal(size=(2, 100, SEEDS_FOR_A_CLAIM))
    assert np.mean(permutation_p(a + 2.0, b, resamples=399) < 0.05) > 0.9


def test_paired_p_is_that_of_every_flip():
    a, b = [0.5, 0.2, 0.9, 0.4, 0.8, 0.9], [0.1, 0.3, 0.2, 0.4, 0.1, 0.5]
    d = [x - y for x, y in zip(a, b, strict=True)]
    sums = [sum(s * x for s, x in zip(signs, d, strict=True)) for signs in itertools.product((1, -1), repeat=6)]
    exact = np.mean([abs(x) >= abs(sum(d)) - 1e-9 for x in sums])
    assert float(paired_p(np.array(a), np.array(b))) == pytest.approx(exact, abs=0.01)
    assert float(paired_p(np.array(a), np.array(a))) == 1.0


@pytest.mark.parametrize("samples", [1, 8])
def test_one_policy_evaluated_twice_differs_from_itself_in_one_of_twenty_comparisons(samples):
    """Prompts from hopeless to certain, as a policy in training has them; .05 plus or minus three standard errors, and
    less where one sample of each prompt ties often."""
    rng = np.random.default_rng(1)
    success = rng.beta(0.4, 0.6, (1000, 128))
    a, b = (rng.binomial(samples, success) / samples for _ in range(2))
    assert 0.02 < np.mean(paired_p(a, b, resamples=399) < 0.05) < 0.071


def test_pairs_over_prompts_see_what_two_means_would_not():
    """Half a standard error of either mean apart, but the same prompts are hard for both."""
    rng = np.random.default_rng(2)
    success = rng.beta(0.4, 0.6, (200, 256))
    a, b = (rng.binomial(64, np.clip(success + shift, 0, 1)) / 64 for shift in (0.0, 0.02))
    assert np.mean(paired_p(a, b, resamples=399) < 0.05) > 0.9


def test_two_seeds_of_one_method_differ_over_prompts_far_more_often_than_one_in_twenty():
    """Why that test may not speak of methods: a seed moves all prompts together, and prompts cannot tell."""
    rng = np.random.default_rng(3)
    success = rng.beta(0.4, 0.6, (400, 128))
    a, b = (rng.binomial(8, np.clip(success + rng.normal(0, 0.05, (400, 1)), 0, 1)) / 8 for _ in range(2))
    assert np.mean(paired_p(a, b, resamples=399) < 0.05) > 0.3


@given(st.lists(st.integers(0, 60).map(lambda i: i / 400), min_size=2, max_size=6))
def test_holm(ps):
    """The definition: the k-th smallest is rejected at a level if it and all smaller ones pass their own share."""
    adjusted = holm(ps)
    for level in (0.01, 0.05, 0.2):
        order, rejected = sorted(range(len(ps)), key=ps.__getitem__), set()
        for rank, i in enumerate(order):
            if ps[i] * (len(ps) - rank) > level:
                break
            rejected.add(i)
        assert {i for i, p in enumerate(adjusted) if p <= level} == rejected


def test_first_reaching():
    x, values = np.array([0.0, 10.0, 20.0, 30.0]), np.array([0.1, 0.5, 0.4, 0.6])
    assert first_reaching(x, values, 0.5) == 10.0
    assert first_reaching(x, values, 0.55) == 30.0
    assert first_reaching(x, values, 0.7) is None
    assert first_reaching(x, np.array([np.nan, np.nan, 0.4, 0.6]), 0.1) == 20.0


def test_the_threshold_is_a_share_of_the_weakest_arms_rise():
    assert common_threshold([0.2, 0.4], [0.8, 0.5]) == pytest.approx(0.3 + 0.9 * 0.2)
    assert common_threshold([-10.0], [-2.0, -5.0]) == pytest.approx(-5.5)
    assert common_threshold([0.3], [0.3, 0.8]) is None
