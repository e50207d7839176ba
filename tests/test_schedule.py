"""Learning-rate schedules: worked value 12 of the semantics."""

from __future__ import annotations

import pytest
import torch

from rl.schedule import lr_factor


def test_worked_value_12_cosine_after_warm_up():
    factors = [lr_factor(step, 22, 220, "cosine") for step in (11, 22, 110, 198, 220, 230)]
    assert factors == pytest.approx([0.5, 1, 0.5868, 0.0302, 0, 0], abs=5e-5)


def test_step_1_moves_the_weights():
    w = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([w], lr=1e-2 * lr_factor(1, 22, 220, "cosine"), weight_decay=0.0)
    w.sum().backward()
    optimizer.step()
    assert w.item() == pytest.approx(1 - 1e-2 / 22)


def test_constant_after_warm_up():
    assert [lr_factor(step, 2, 9, "constant") for step in (1, 2, 3, 99)] == [0.5, 1, 1, 1]
    assert lr_factor(1, 0, 9, "constant") == 1


def test_a_warm_up_longer_than_the_run_only_warms_up():
    assert [lr_factor(step, 10, 4, "cosine") for step in (1, 4)] == pytest.approx([0.1, 0.4])


def test_what_is_refused():
    with pytest.raises(ValueError, match="'linear' given, allowed: constant, cosine"):
        lr_factor(1, 0, 1, "linear")
    with pytest.raises(ValueError, match="counted from 1"):
        lr_factor(0, 0, 1, "constant")
