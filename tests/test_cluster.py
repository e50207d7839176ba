"""A failed actor in one line: who, where, why."""

from __future__ import annotations

import pytest
import ray

from rl.cluster import Pending, WorkerFailure, WorkerGroup, get


@ray.remote(num_cpus=0.1)
class Fragile:
    def __init__(self, broken: bool = False) -> None:
        if broken:
            raise OSError("no such model")

    def work(self, x: int) -> int:
        if x < 0:
            raise ValueError("negative work\nand a second line")
        return x + 1

    def die(self) -> None:
        import os

        os._exit(1)


def test_results_come_rank_by_rank(ray_session):
    group = WorkerGroup("critic", [Fragile.remote() for _ in range(2)], ["critic[0]", "critic[1]"])
    assert group.call("work", 1) == [2, 2]
    assert group.call("work", per_rank=[(1,), (5,)]) == [2, 6]


def test_an_exception_names_actor_and_cause_and_keeps_the_traceback(ray_session):
    with pytest.raises(WorkerFailure, match=r"^critic\[0\] failed: ValueError: negative work$") as caught:
        get(Fragile.remote().work.remote(-1), "critic[0]")
    assert "in work" in str(caught.value.__cause__)


def test_a_broken_constructor_names_its_cause(ray_session):
    with pytest.raises(WorkerFailure, match=r"policy\[0\] failed: .*OSError: no such model"):
        get(Fragile.remote(True).work.remote(1), "policy[0]")


def test_a_dead_rank_is_seen_while_its_peer_still_works(ray_session):
    @ray.remote(num_cpus=0.1)
    class Waiting:
        def wait(self):
            import threading

            threading.Event().wait()

    waiting, dying = Waiting.remote(), Fragile.remote()
    pending = Pending([waiting.wait.remote(), dying.die.remote()], ["policy[0]", "policy[1]"])
    with pytest.raises(WorkerFailure, match=r"policy\[1\] failed: .*died"):
        pending.get()
    ray.kill(waiting)
