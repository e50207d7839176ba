"""Learning-rate schedules, as a factor of the configured rate."""

from __future__ import annotations

import math


def lr_factor(step: int, warmup: int, total: int, schedule: str) -> float:
    """Factor of optimizer step `step`, counted from 1: so the first step already moves the weights.

    Linear over the first `warmup` steps, then `constant`, or `cosine` down to 0 at step `total` and 0 beyond
    it.
    """
    if step < 1:
        raise ValueError(f"step: {step} given, optimizer steps are counted from 1")
    if schedule not in ("constant", "cosine"):
        raise ValueError(f"schedule: {schedule!r} given, allowed: constant, cosine")
    if step < warmup:
        return step / warmup
    if schedule == "constant":
        return 1.0
    progress = min((step - warmup) / max(total - warmup, 1), 1.0)
    return 0.5 * (1.0 + math.cos(math.pi * progress))
