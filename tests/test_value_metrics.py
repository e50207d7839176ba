"""The critic's marks: overall, by place in the response, by length."""

from __future__ import annotations

import numpy as np
import pytest

from rl.advantages import explained_variance
from rl.value_metrics import spread, value_metrics


def test_a_critic_that_is_right_at_the_end_alone():
    """Values know the return in the last quarter only, and only of short responses."""
    returns = [np.full(8, 1.0), np.full(8, 0.0), np.full(2, 1.0), np.full(2, 0.0)]
    values = [np.full(8, 0.5), np.full(8, 0.5), np.full(2, 1.0), np.full(2, 0.0)]
    values[0][6:], values[1][6:] = 1.0, 0.0
    m = value_metrics(values, returns, max_response_tokens=8)
    assert m["critic/explained_variance/length_1of4"] == pytest.approx(1)
    assert m["critic/explained_variance/length_4of4"] == pytest.approx(0.25)
    assert "critic/explained_variance/length_2of4" not in m
    assert m["critic/explained_variance/position_4of4"] == pytest.approx(1)
    assert m["critic/explained_variance/position_2of4"] == pytest.approx(0)
    assert m["critic/explained_variance"] == explained_variance(np.concatenate(values), np.concatenate(returns))
    assert m["critic/error"] == pytest.approx(0.5 * 12 / 20)
    assert m["critic/return_mean"] == pytest.approx(0.5)
    assert (m["critic/return_min"], m["critic/return_max"]) == (0, 1)


def test_a_response_over_the_budget_is_in_the_last_quarter():
    m = value_metrics([np.zeros(9), np.zeros(9)], [np.ones(9), np.zeros(9)], max_response_tokens=4)
    assert {k for k in m if "length" in k} == {"critic/explained_variance/length_4of4"}


def test_quarters_whose_returns_do_not_vary_have_no_mark():
    m = value_metrics([np.zeros(4)], [np.ones(4)], max_response_tokens=4)
    assert not [k for k in m if "of4" in k]
    assert m["critic/explained_variance"] == 0


def test_nothing_of_nothing():
    assert value_metrics([np.zeros(0)], [np.zeros(0)], 4) == {}
    assert spread("x", np.zeros(0)) == {}
