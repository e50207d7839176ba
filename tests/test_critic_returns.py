"""The critic's step without DeepSpeed: values, updates and the scale of returns, the same for any micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from critic.model import ValueHead, ValueModel, build
from critic.returns import RunningReturns, first_returns
from critic.worker import CriticWorker
from rl.config import Config
from rl.learner import LossFunction, Stats
from rl.trajectory import Trajectory, microbatches, pack
from tests.test_critic import PACK, llama  # noqa: F401

Worker: Any = CriticWorker.__ray_metadata__.modified_class
TRAINED_ON = [t for t in PACK if t.actions]


class Plain:
    """A learner of one rank with the optimizer alone."""

    def __init__(self, model: ValueModel, tokens: int, lr: float) -> None:
        self._model, self._tokens = model, tokens
        self._optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)

    @torch.no_grad()
    def forward(
        self, trajectories: Sequence[Trajectory], function: Callable[..., Any], *, then_step: bool = False
    ) -> list[Any]:
        return [function(self._model, pack(b)) for b in microbatches(trajectories, self._tokens)]

    def step(self, trajectories: Sequence[Trajectory], loss: LossFunction, lr_factor: float) -> tuple[Stats, float]:
        stats = Stats()
        self._optimizer.zero_grad()
        for batch in microbatches(trajectories, self._tokens):
            value, measured = loss(self._model, pack(batch))
            value.backward()
            stats = stats.merge(measured)
        self._optimizer.step()
        return stats, 0.0


def worker_of(folder: str, tokens: int, lr: float = 1e-2, **critic: Any) -> Any:
    config = Config()
    config.policy.path = folder
    config.step.tokens_per_microbatch = tokens
    config.critic.experts.balance_coefficient = 1.0
    for key, value in critic.items():
        setattr(config.critic, key, value)
    worker = Worker(config, 0, 1)
    torch.manual_seed(0)
    worker.model = build(config.critic, folder)
    worker.learner = Plain(worker.model, tokens, lr)
    return worker


def test_a_step_is_the_same_for_any_microbatches(llama: str) -> None:  # noqa: F811
    one, many = (worker_of(llama, tokens, freeze="encoder", returns="normalised") for tokens in (1000, 20))
    for a, b in zip(one.values(TRAINED_ON), many.values(TRAINED_ON), strict=True):
        np.testing.assert_allclose(a, np.full(len(a), first_returns(TRAINED_ON, 1.0).mean()), rtol=1e-5)
        np.testing.assert_allclose(b, a, rtol=1e-5)
    for _ in range(3):
        a, b = (w.update(TRAINED_ON, 1.0)[0].means() for w in (one, many))
        assert a == pytest.approx(b, rel=1e-4)
        assert a["critic/weights_moved"] == 1.0
    for p, q in zip(one.model.parameters(), many.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-4, rtol=1e-3)
    assert one.model.trunk.forwards == many.model.trunk.forwards == len(TRAINED_ON)


def test_a_critic_that_does_not_move_says_so(llama: str) -> None:  # noqa: F811
    worker = worker_of(llama, 1000, lr=0.0, freeze="encoder")
    worker.values(TRAINED_ON)
    assert worker.update(TRAINED_ON, 1.0)[0].maxima["critic/weights_moved"] == 0.0


def test_the_loss_is_in_the_unit_of_the_scale(llama: str) -> None:  # noqa: F811
    plain, scaled = worker_of(llama, 1000), worker_of(llama, 1000)
    scaled.model.head.spread.fill_(2.0)  # the head says 0 either way
    found, expected = (w.update(TRAINED_ON, 1.0)[0].means()["critic/loss"] for w in (scaled, plain))
    assert found == pytest.approx(expected / 4)


def test_first_returns_are_discounted_to_every_action() -> None:
    t = replace(TRAINED_ON[0], score=2.0)  # seven tokens, the second and the sixth are observations
    np.testing.assert_allclose(first_returns([t], 0.5), [2 * 0.5**k for k in (4, 3, 2, 1, 0)])
    with pytest.raises(ValueError, match=r"prompt 0, sample 0.* has no score"):
        first_returns([replace(t, score=None)], 1.0)


def test_the_scale_follows_returns_as_configured() -> None:
    rng = np.random.default_rng(0)
    steps = [rng.normal(3, 2, 500), rng.normal(5, 1, 300)]
    centred, normalised = ValueHead(4), ValueHead(4)
    for returns in steps:
        RunningReturns(centred, "centred").observe(returns)
        RunningReturns(normalised, "normalised").observe(returns)
    assert float(centred.centre) == pytest.approx(steps[0].mean())
    assert float(centred.spread) == 1.0
    mean = 0.9 * steps[0].mean() + 0.1 * steps[1].mean()
    square = 0.9 * np.square(steps[0]).mean() + 0.1 * np.square(steps[1]).mean()
    assert float(normalised.centre) == pytest.approx(mean, rel=1e-5)
    assert float(normalised.spread) == pytest.approx((square - mean**2) ** 0.5, rel=1e-5)
    assert normalised(torch.zeros(2, 4)).tolist() == pytest.approx([mean, mean], rel=1e-5)


def test_returns_that_never_vary_keep_their_unit_and_none_change_nothing() -> None:
    head = ValueHead(4)
    RunningReturns(head, "normalised").observe(np.zeros(0))
    assert (float(head.centre), float(head.observed)) == (0.0, 0.0)
    RunningReturns(head, "normalised").observe(np.full(10, 0.7))
    assert float(head.centre) == pytest.approx(0.7)
    assert float(head.spread) == 1.0
