"""Ray placement and worker groups: says what it asked for and what there is."""

from __future__ import annotations

from typing import Any


class WorkerFailure(RuntimeError):
    """An actor failed; the message names it, its role, its node and the cause."""


def get(refs: Any, who: str) -> Any:
    """`ray.get` whose failure is one line naming `who` (for example "rollout[0]"), its node and the cause."""
    raise NotImplementedError
