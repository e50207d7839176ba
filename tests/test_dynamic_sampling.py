"""Dynamic sampling: whole groups, the step's size whatever was drawn, and never past the bound."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rl.dynamic_sampling import dynamic_sampling
from rl.trajectory import Trajectory


def trajectory(prompt: int, sample: int, score: float) -> Trajectory:
    return Trajectory(
        prompt_index=prompt,
        sample_index=sample,
        prompt_ids=np.zeros(1, np.int32),
        response_ids=np.zeros(1, np.int32),
        action_mask=np.ones(1, bool),
        rollout_logprobs=np.zeros(1, np.float32),
        finish_reason="stop",
        policy_version=0,
        score=score,
    )


class Stream:
    """Prompts one after another, whose two samples differ in score or not."""

    def __init__(self, varied: Iterator[bool]):
        self.varied, self.index, self.draws = varied, 0, []

    def __call__(self, n: int) -> list[Trajectory]:
        self.draws.append(n)
        drawn = []
        for _ in range(n):
            drawn += [trajectory(self.index, 0, 1.0), trajectory(self.index, 1, 1.0 - next(self.varied))]
            self.index += 1
        return drawn


def test_flat_groups_make_room_for_new_ones():
    stream = Stream(iter([False, True, False, True, False, True]))
    sampled = dynamic_sampling(stream, wanted=3, rounds=5)
    assert [t.prompt_index for t in sampled.trajectories] == [1, 1, 3, 3, 5, 5]
    assert stream.draws == [3, 2, 1]
    assert sampled.groups_drawn == 6


def test_at_the_bound_flat_groups_fill_up():
    stream = Stream(iter([False, True, False, False, False, False]))
    sampled = dynamic_sampling(stream, wanted=3, rounds=1)
    assert [t.prompt_index for t in sampled.trajectories] == [1, 1, 0, 0, 2, 2]
    assert stream.draws == [3, 2]


@given(st.lists(st.booleans(), min_size=200, max_size=200), st.integers(1, 8), st.integers(0, 5))
def test_a_step_has_its_size_and_as_many_varied_groups_as_were_seen(varied, wanted, rounds):
    stream = Stream(iter(varied))
    sampled = dynamic_sampling(stream, wanted, rounds)
    groups = [(i, list(g)) for i, g in groupby(sampled.trajectories, key=lambda t: t.prompt_index)]
    assert len(groups) == len({i for i, _ in groups}) == wanted
    assert all([t.sample_index for t in g] == [0, 1] for _, g in groups)
    assert len(stream.draws) <= 1 + rounds
    assert sampled.groups_drawn == sum(stream.draws) == stream.index
    assert sum(varied[i] for i, _ in groups) == min(wanted, sum(varied[: stream.index]))
