"""Advantages against slow loops, worked values 1, 2, 3, 8, 9, 11 of the semantics, and their laws."""

from __future__ import annotations

from itertools import zip_longest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl import advantages as adv

NUMBER = st.floats(-10, 10, width=32)
FACTOR = st.floats(0, 1)


@st.composite
def responses(draw, max_tokens=24):
    """(values [T+1], rewards [T], action_mask [T]); also empty, and without actions."""
    tokens = draw(st.integers(0, max_tokens))

    def array(strategy, n, dtype):
        return np.array(draw(st.lists(strategy, min_size=n, max_size=n)), dtype)

    return (
        array(NUMBER, tokens + 1, np.float32),
        array(NUMBER, tokens, float),
        array(st.booleans(), tokens, bool),
    )


def slow_gae(values, rewards, mask, gamma, lam, bootstrap):
    """The definition, token by token from the end."""
    out = np.zeros(len(mask))
    successor, running, carried = bootstrap, 0.0, 0.0
    for t in reversed(range(len(mask))):
        carried += rewards[t]
        if mask[t]:
            running = carried + gamma * successor - float(values[t]) + gamma * lam * running
            out[t], successor, carried = running, float(values[t]), 0.0
    return out


def all_actions(n):
    return np.ones(n, bool)


def test_worked_value_1_truncation_is_terminal():
    got = adv.gae(np.array([0.5, 0.4, 0.3, 0.3]), np.zeros(3), all_actions(3), gamma=1, lam=0.95, bootstrap_value=0)
    np.testing.assert_allclose(got, [-0.4658, -0.3850, -0.3], atol=5.1e-5)


def test_worked_value_2_truncation_bootstraps():
    got = adv.gae(np.array([0.5, 0.4, 0.3, 0.3]), np.zeros(3), all_actions(3), gamma=1, lam=0.95, bootstrap_value=0.3)
    np.testing.assert_allclose(got, [-0.195, -0.1, 0], atol=1e-12)


@given(responses(), FACTOR, FACTOR, NUMBER)
def test_gae_is_the_slow_loop(response, gamma, lam, bootstrap):
    got = adv.gae(*response, gamma=gamma, lam=lam, bootstrap_value=bootstrap)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, slow_gae(*response, gamma, lam, bootstrap), rtol=1e-9, atol=1e-9)


@given(responses(), FACTOR, NUMBER)
def test_lambda_1_is_return_minus_value(response, gamma, bootstrap):
    values, rewards, mask = response
    got = adv.gae(*response, gamma=gamma, lam=1.0, bootstrap_value=bootstrap)
    g = adv.returns(rewards, mask, gamma=gamma, bootstrap_value=bootstrap)
    np.testing.assert_allclose(got, np.where(mask, g - values[:-1], 0), rtol=1e-9, atol=1e-9)


@given(responses(), FACTOR, NUMBER)
def test_lambda_0_is_the_td_error(response, gamma, bootstrap):
    values, rewards, mask = response
    got = adv.gae(*response, gamma=gamma, lam=0.0, bootstrap_value=bootstrap)
    actions = np.flatnonzero(mask)
    for here, following in zip_longest(actions, actions[1:]):
        reward = rewards[here:following].sum()
        successor = bootstrap if following is None else float(values[following])
        assert got[here] == pytest.approx(reward + gamma * successor - float(values[here]), abs=1e-9)


@given(responses(), FACTOR, FACTOR, NUMBER, st.data())
def test_observations_change_no_actions_advantage(response, gamma, lam, bootstrap, data):
    values, rewards, mask = response
    before = adv.gae(*response, gamma=gamma, lam=lam, bootstrap_value=bootstrap)
    where = data.draw(st.integers(0, len(mask)))
    count = data.draw(st.integers(1, 5))
    longer = (
        np.insert(values, where, [np.nan] * count),
        np.insert(rewards, where, [0.0] * count),
        np.insert(mask, where, [False] * count),
    )
    after = adv.gae(*longer, gamma=gamma, lam=lam, bootstrap_value=bootstrap)
    np.testing.assert_array_equal(after[longer[2]], before[mask])
    assert not after[~longer[2]].any()


@given(responses(), FACTOR)
def test_returns_are_the_slow_sum(response, gamma):
    _, rewards, mask = response
    # Discounting counts actions, not tokens.
    time = np.cumsum(mask) - 1
    got = adv.returns(rewards, mask, gamma=gamma)
    for t in np.flatnonzero(mask):
        expected = sum(rewards[s] * gamma ** (time[s] - time[t]) for s in range(t, len(mask)))
        assert got[t] == pytest.approx(expected, abs=1e-9)


def test_gae_of_100_000_tokens_is_the_slow_loop():
    rng = np.random.default_rng(0)
    n = 100_000
    values, rewards, mask = rng.normal(size=n + 1), rng.normal(size=n) / n, rng.random(n) < 0.8
    got = adv.gae(values, rewards, mask, gamma=1.0, lam=0.999, bootstrap_value=0.5)
    np.testing.assert_allclose(got, slow_gae(values, rewards, mask, 1.0, 0.999, 0.5), rtol=1e-8, atol=1e-8)


def test_gae_refuses_values_of_another_length():
    with pytest.raises(ValueError, match="3 given, must be one more than the 3 response tokens"):
        adv.gae(np.zeros(3), np.zeros(3), all_actions(3), gamma=1, lam=1, bootstrap_value=0)


def test_adaptive_lambda():
    assert adv.adaptive_lambda(1000) == pytest.approx(0.98)
    assert adv.adaptive_lambda(100, alpha=0.1) == pytest.approx(0.9)
    assert adv.adaptive_lambda(10) == 0.0  # 1 - 1/.5 is clamped
    assert adv.adaptive_lambda(0) == 0.0


def test_score_lands_on_the_last_action():
    mask = np.array([True, True, False, False])
    np.testing.assert_array_equal(adv.place_rewards(2.0, mask), [0, 2, 0, 0])


def test_rewards_on_observations_are_carried_back():
    mask = np.array([True, False, False, True, False])
    token_rewards = np.array([0.5, 1.0, 2.0, 4.0, 8.0])
    np.testing.assert_array_equal(adv.place_rewards(16.0, mask, token_rewards), [3.5, 0, 0, 28, 0])


def test_rewards_before_the_first_action_are_no_actions_doing():
    np.testing.assert_array_equal(adv.place_rewards(1.0, np.array([False, True]), np.array([5.0, 0.0])), [0, 1])


@pytest.mark.parametrize("mask", [np.zeros(0, bool), np.zeros(3, bool)])
def test_responses_without_actions(mask):
    n = len(mask)
    rewards = adv.place_rewards(1.0, mask, np.ones(n))
    assert rewards.shape == (n,)
    assert not rewards.any()
    advantages = adv.gae(np.ones(n + 1), rewards, mask, gamma=1, lam=1, bootstrap_value=1)
    assert advantages.shape == (n,)
    assert not advantages.any()
    assert not adv.returns(rewards, mask, gamma=1, bootstrap_value=1).any()
    assert [len(a) for a in adv.whiten([advantages], [mask])] == [n]


def test_overlong_penalty_falls_over_the_buffer():
    tokens = [0, 60, 80, 85, 90, 100, 130]
    assert [adv.overlong_penalty(n, 100, 20) for n in tokens] == pytest.approx([0, 0, 0, -0.25, -0.5, -1, -1])
    assert adv.overlong_penalty(100, 100, 0) == 0


def test_worked_value_9_kl_penalty_and_score():
    kl, mask = np.array([0.1, 0.2, 0.3]), all_actions(3)
    rewards = adv.place_rewards(1.0, mask) + adv.per_token_kl_rewards(kl, mask, 0.05)
    np.testing.assert_allclose(rewards, [-0.005, -0.01, 0.985], atol=1e-12)
    assert kl.mean() == pytest.approx(0.2)  # untouched by what was folded into the reward
    assert adv.total_reward(rewards) == pytest.approx(0.97)


def test_kl_rewards_ignore_observations():
    got = adv.per_token_kl_rewards(np.array([1.0, np.nan]), np.array([True, False]), 0.5)
    np.testing.assert_array_equal(got, [-0.5, 0])


def test_worked_value_8_kl_estimates():
    p, q = np.array([-1.0]), np.array([-1.5])
    got = [adv.kl_tokens(p, q, kind).item() for kind in ("k1", "k2", "k3")]
    np.testing.assert_allclose(got, [0.5, 0.125, 0.1065], atol=5e-5)
    with pytest.raises(ValueError, match="'k4' given, allowed: k1, k2, k3"):
        adv.kl_tokens(p, q, "k4")


def test_worked_value_3_whitening_is_over_the_step():
    mask = np.array([True, False, False])
    a, b = adv.whiten([np.array([1.0, 2, 3]), np.array([4.0, np.nan, np.inf])], [all_actions(3), mask])
    np.testing.assert_allclose(a, [-1.3416, -0.4472, 0.4472], atol=5e-5)
    np.testing.assert_allclose(b, [1.3416, 0, 0], atol=5e-5)


def test_whitening_what_does_not_vary_gives_0():
    (one,) = adv.whiten([np.array([7.0])], [all_actions(1)])
    assert one == 0.0
    (equal,) = adv.whiten([np.array([0.1 + 0.2, 0.3, 0.3])], [all_actions(3)])
    np.testing.assert_allclose(equal, 0, atol=1e-7)  # rounding noise stays noise
    assert adv.whiten([], []) == []


@given(st.lists(responses(), min_size=1, max_size=4))
def test_whitened_moments(step):
    masks = [mask for _, _, mask in step]
    whitened = adv.whiten([rewards for _, rewards, _ in step], masks)
    tokens = np.concatenate([w[m] for w, m in zip(whitened, masks, strict=True)])
    raw = np.concatenate([r[m] for _, r, m in step])
    if len(raw) and raw.std() > 1e-3:
        assert tokens.mean() == pytest.approx(0, abs=1e-9)
        assert tokens.std() == pytest.approx(1, abs=1e-4)


def test_worked_value_11_group_advantages():
    got, flat = adv.group_advantages(np.array([1.0, 0, 0, 1]), np.zeros(4, int), normalize_std=True)
    np.testing.assert_allclose(got, [0.8660, -0.8660, -0.8660, 0.8660], atol=5e-5)
    assert flat == 0


def test_dr_grpo_leaves_the_deviation_out():
    got, _ = adv.group_advantages(np.array([1.0, 0, 0, 1]), np.zeros(4, int), normalize_std=False)
    np.testing.assert_array_equal(got, [0.5, -0.5, -0.5, 0.5])


def test_groups_without_variance_get_exactly_0_and_are_counted():
    scores = np.array([0.1, 1, 0.1, 0, 0.1, 0.7, 0.7])
    got, flat = adv.group_advantages(scores, np.array([5, 2, 5, 2, 5, 9, 9]), normalize_std=True)
    assert flat == 2
    assert not got[[0, 2, 4, 5, 6]].any()
    assert got[1] > 0 > got[3]


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="group 3: 1 sample given"):
        adv.group_advantages(np.array([1.0, 0, 1]), np.array([1, 1, 3]), normalize_std=True)


@given(
    st.lists(st.tuples(st.integers(0, 2), NUMBER), max_size=12),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_group_laws(rows, normalize_std, random):
    rows += [(group, 1.0) for group in range(3) for _ in range(2)]
    random.shuffle(rows)
    groups, scores = (np.array(x) for x in zip(*rows, strict=True))
    got, _ = adv.group_advantages(scores, groups, normalize_std=normalize_std)
    for group in range(3):
        assert got[groups == group].sum() == pytest.approx(0, abs=1e-6)
    # Another group's scores change, this one's advantages do not.
    other, _ = adv.group_advantages(np.where(groups == 1, scores, scores * 3 + 1), groups, normalize_std=normalize_std)
    np.testing.assert_array_equal(other[groups == 1], got[groups == 1])


def test_explained_variance():
    g = np.array([0.0, 1, 2, 3])
    assert adv.explained_variance(g, g) == 1.0
    assert adv.explained_variance(g + 5, g) == 1.0  # a constant error is bias, not variance
    assert adv.explained_variance(np.full(4, 1.5), g) == pytest.approx(0)
    assert adv.explained_variance(-g, g) == pytest.approx(-3)
    assert adv.explained_variance(np.arange(7.0), np.full(7, 0.1)) == 0.0  # np.var gives 2e-34
    assert adv.explained_variance(np.zeros(0), np.zeros(0)) == 0.0
