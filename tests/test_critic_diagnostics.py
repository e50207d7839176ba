"""Diagnostics of the critic: each number against a case that can be checked by eye."""

from __future__ import annotations

import io

import numpy as np
import pytest

from critic.diagnostics import (
    PATIENCE,
    alerts,
    by_length,
    by_position,
    calibration,
    calibration_figure,
    expert_load,
    predictions,
    scalars,
)


def step(lengths, seed=0):
    """Returns at random, and values equal to them in the second half of every response, 0 in the first."""
    rng = np.random.default_rng(seed)
    returns = [rng.normal(size=n) for n in lengths]
    values = [np.where(np.arange(n) * 2 >= n, g, 0.0) for n, g in zip(lengths, returns, strict=True)]
    return values, returns, [np.ones(n, bool) for n in lengths]


def test_observations_are_never_read_and_do_not_count_as_places():
    mask = np.array([True, False, True])
    p = predictions([np.array([1.0, np.nan, 2.0])], [np.array([0.0, np.nan, 4.0])], [mask])
    assert (p.position.tolist(), p.length.tolist()) == ([0, 1], [2, 2])
    found = scalars(p, 4)
    assert (found["critic/error_first"], found["critic/error_last"], found["critic/error"]) == (1.0, 2.0, 1.5)
    assert (found["critic/return_mean"], found["critic/return_min"], found["critic/return_max"]) == (2.0, 0.0, 4.0)
    assert (found["critic/value_std"], found["critic/return_std"]) == (0.5, 2.0)


def quarters(found, name):
    start = f"critic/explained_variance/{name}_"
    return {int(key.removeprefix(start)[0]): value for key, value in found.items() if key.startswith(start)}


def test_explained_variance_by_position_tells_a_critic_that_only_knows_the_end():
    found = quarters(by_position(predictions(*step([40, 80, 8]))), "position")
    assert found == pytest.approx({1: 0, 2: 0, 3: 1, 4: 1}, abs=1e-12)


def test_explained_variance_by_length_tells_a_critic_that_only_knows_short_responses():
    rng = np.random.default_rng(0)
    lengths = [10] * 16 + [40] * 4 + [80] * 2 + [160]
    returns = [rng.normal(size=n) for n in lengths]
    values = [g if len(g) <= 40 else np.zeros_like(g) for g in returns]
    p = predictions(values, returns, [np.ones(n, bool) for n in lengths])
    assert quarters(by_length(p, 160), "length") == pytest.approx({1: 1, 2: 0, 4: 0}, abs=1e-12)
    assert list(quarters(by_length(p, 40), "length")) == [1, 4]  # over the budget is in the last quarter


def test_a_quarter_whose_returns_do_not_vary_is_left_out():
    found = scalars(predictions([np.zeros(4)], [np.ones(4)], [np.ones(4, bool)]), 4)
    assert found["critic/explained_variance"] == 0
    assert not quarters(found, "position")
    assert not quarters(found, "length")


def test_calibration_is_the_diagonal_for_a_critic_that_means_what_it_says():
    rng = np.random.default_rng(0)
    v = rng.uniform(size=5000)
    honest = predictions([v], [(rng.uniform(size=5000) < v).astype(float)], [np.ones(5000, bool)])
    c = calibration(honest)
    assert c.count.tolist() == [500] * 10
    assert np.abs(c.realised - c.predicted).max() < 4 * c.error.max()
    loud = predictions([4 * v], [honest.returns], [np.ones(5000, bool)])
    assert np.abs(calibration(loud).realised - calibration(loud).predicted).max() > 2
    assert calibration(predictions([v[:3]], [v[:3]], [np.ones(3, bool)])).count.tolist() == [1, 1, 1]


def test_nothing_comes_of_a_step_without_actions():
    empty = predictions([np.zeros(2)], [np.zeros(2)], [np.zeros(2, bool)])
    assert scalars(empty, 4) == {}
    assert len(calibration(empty).count) == 0
    assert by_length(empty, 4) == by_position(empty) == {}


def test_expert_load_and_its_entropy():
    even = expert_load(np.full((2, 4), 0.25))
    assert even == {
        "critic/expert_load_max": 1.0,
        "critic/expert_load_min": 1.0,
        "critic/expert_load_entropy": pytest.approx(1.0),
    }
    one = expert_load(np.array([[1.0, 0, 0, 0]]))
    assert (one["critic/expert_load_max"], one["critic/expert_load_min"]) == (4.0, 0.0)
    assert one["critic/expert_load_entropy"] == 0.0


HEALTHY = {
    "critic/explained_variance": 0.4,
    "critic/weights_moved": 1.0,
    "critic/value_std": 0.3,
    "critic/return_std": 0.5,
}


@pytest.mark.parametrize(
    ("change", "starts"),
    [
        ({"critic/weights_moved": 0.0}, "the critic is frozen"),
        ({"critic/value_std": 0.004, "critic/explained_variance": 0.0}, "the critic has collapsed"),
        ({"critic/explained_variance": -0.3}, "the critic does harm"),
    ],
)
def test_an_alert_needs_a_row_of_bad_steps(change, starts):
    bad = HEALTHY | change
    assert alerts([HEALTHY] * 9) == {}
    assert alerts([bad] * (PATIENCE - 1)) == {}
    assert alerts([HEALTHY, *[bad] * (PATIENCE - 1), HEALTHY]) == {}
    (line,) = alerts([HEALTHY, *[bad] * PATIENCE, {"eval/success": 1.0}]).values()
    assert line.startswith(starts)
    assert "\n" not in line


def test_returns_that_do_not_differ_are_no_collapse():
    assert alerts([HEALTHY | {"critic/value_std": 0.0, "critic/return_std": 0.0}] * 9) == {}


def test_the_picture_is_drawn():
    c = calibration(predictions(*step([40, 80, 8])))
    figure, file = calibration_figure(c), io.BytesIO()
    figure.savefig(file, format="png")
    assert file.getvalue().startswith(b"\x89PNG")
    assert np.allclose(figure.axes[0].lines[1].get_xydata().T, [c.predicted, c.realised])
    calibration_figure(calibration(predictions([], [], [])))
