"""What matrix multiplication alone takes: the job's operations over the rate at which this machine multiplies.

Run as a script it prints the rates as JSON; it is a process of its own because threads are fixed at import.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from beside import job

BACKWARD = 2
"""A backward pass multiplies twice: for the weights and for what came in."""


@dataclass(frozen=True)
class Passes:
    """Passes over a step's sequences, forward passes as the unit: generation apart, since it multiplies by few rows."""

    generation: int
    others: int


def needed(algorithm: str, epochs: int, optimizer_steps: int) -> Passes:
    """What the algorithm needs. PPO's old values and log-probabilities are passes of their own only where several
    optimizer steps follow; a single one begins with the same passes."""
    models = 2 if algorithm == "ppo" else 1
    several = epochs * optimizer_steps > 1
    return Passes(1, models * (epochs * (1 + BACKWARD) + several))


def by_trl(algorithm: str, epochs: int) -> Passes:
    """What TRL computes: PPO's old log-probabilities come out of generation, reference and values each cost a pass."""
    models, judged = (2, 2) if algorithm == "ppo" else (1, 0)
    return Passes(1, models * epochs * (1 + BACKWARD) + judged)


def forward_flops() -> float:
    """Operations of one forward pass over a step's sequences, head at the response tokens alone."""
    tokens = job.PROMPT + job.RESPONSE
    layer = 2 * (4 * job.HIDDEN**2 + 3 * job.HIDDEN * job.INNER) * tokens + 4 * job.HIDDEN * tokens**2 / 2
    return job.SEQUENCES * (job.LAYERS * layer + 2 * job.HIDDEN * job.VOCABULARY * job.RESPONSE)


def seconds(passes: Passes, rates: dict[str, float]) -> float:
    """CPU seconds of a step's multiplications."""
    return forward_flops() * (passes.generation / rates["generation"] + passes.others / rates["training"])


def rate(rows: int, trials: int = 5) -> float:
    """Best rate of `rows` x hidden x inner in float32, operations per CPU second."""
    import torch

    torch.set_num_threads(1)
    x, w = torch.randn(rows, job.HIDDEN), torch.randn(job.INNER, job.HIDDEN)
    flops = 2 * rows * job.HIDDEN * job.INNER
    repeats = max(1, int(5e9 / flops))
    best = 0.0
    for _ in range(trials):
        start = time.process_time()
        for _ in range(repeats):
            torch.nn.functional.linear(x, w)
        best = max(best, repeats * flops / (time.process_time() - start))
    return best


if __name__ == "__main__":
    both = {
        "training": rate(job.SEQUENCES * (job.PROMPT + job.RESPONSE)),
        "generation": rate(job.SEQUENCES),
    }
    print(json.dumps(both))
