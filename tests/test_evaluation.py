"""Evaluation: pass@k against counting, what is asked of the engines, and what is made of their answers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.config import EvalConfig
from rl.evaluation import best_of_k, evaluate, ks
from rl.trajectory import Prompt
from tests.test_telemetry import trajectory


@pytest.mark.parametrize(
    ("successes", "n", "k", "expected"),
    [(1, 4, 1, 0.25), (1, 4, 2, 0.5), (2, 4, 2, 5 / 6), (0, 8, 4, 0.0), (5, 8, 4, 1.0), (3, 10, 5, 1 - 21 / 252)],
)
def test_pass_at_k_by_hand(successes, n, k, expected):
    """1 - C(n - c, k) / C(n, k); the last is 1 - C(7, 5) / C(10, 5)."""
    scores = np.array([1.0] * successes + [0.0] * (n - successes))
    assert float(best_of_k(scores, k)) == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=9), st.data())
def test_best_of_k_is_the_mean_over_all_subsets(scores, data):
    k = data.draw(st.integers(1, len(scores)))
    bests = [max(subset) for subset in itertools.combinations(scores, k)]
    assert float(best_of_k(np.array(scores), k)) == pytest.approx(sum(bests) / len(bests), abs=1e-9)


def test_it_is_unbiased_where_the_naive_estimate_is_not():
    """Every outcome of four samples at success probability .3, weighted by its own: 1 - .7^2 for k = 2."""
    p, unbiased, naive = 0.3, 0.0, 0.0
    for outcome in itertools.product((0.0, 1.0), repeat=4):
        weight = math.prod(p if x else 1 - p for x in outcome)
        unbiased += weight * float(best_of_k(np.array(outcome), 2))
        naive += weight * (1 - (1 - np.mean(outcome)) ** 2)
    assert unbiased == pytest.approx(1 - 0.7**2, abs=1e-12)
    assert naive < unbiased - 0.01


def test_thousands_of_samples_do_not_overflow():
    scores = np.zeros((2, 5000))
    scores[1, :50] = 1
    exact = 1 - math.comb(4950, 64) / math.comb(5000, 64)
    assert best_of_k(scores, 64).tolist() == [0.0, pytest.approx(exact, rel=1e-9)]


def test_k_is_bounded_by_the_samples():
    for k in (0, 5):
        with pytest.raises(ValueError, match=f"k: {k} given, must be 1 to the 4 samples"):
            best_of_k(np.zeros(4), k)
    assert (ks(1), ks(3), ks(8)) == ([], [2], [2, 4, 8])


class Pool:
    """In place of engines: prompt i is answered rightly by its first i samples, greedily from prompt 2 on."""

    def __init__(self):
        self.asked = []

    def generate(self, prompts, samples, *, step, temperature, record=0):
        self.asked.append((len(prompts), samples, step, temperature))
        return [
            trajectory(p.index, str(p.index > 1 if temperature == 0 else s < p.index), sample_index=s, score=None)
            for p in prompts
            for s in range(samples)
        ]


def right(trajectories):
    return [float(t.text == "True") for t in trajectories]


PROMPTS = [Prompt(i, np.arange(3, dtype=np.int32), "a") for i in range(4)]


def test_an_evaluation_is_sampled_and_greedy_at_equal_seeds():
    pool = Pool()
    found = evaluate(pool, PROMPTS, right, EvalConfig(samples=4, temperature=0.7))
    assert pool.asked == [(4, 4, -1, 0.7), (4, 1, -1, 0.0)]
    assert found.scores.tolist() == [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]
    assert found.metrics() == {
        "eval/success": pytest.approx(6 / 16),
        "eval/greedy": 0.5,
        "eval/pass@2": pytest.approx((0 + 1 / 2 + 5 / 6 + 1) / 4),
        "eval/pass@4": 0.75,
        "eval/response_tokens": 3.0,
        "eval/truncated": 0.0,
    }


def test_greedy_can_be_left_out_and_one_sample_has_no_pass_at_k():
    pool = Pool()
    found = evaluate(pool, PROMPTS, right, EvalConfig(greedy=False))
    assert len(pool.asked) == 1
    assert set(found.metrics()) == {"eval/success", "eval/response_tokens", "eval/truncated"}
