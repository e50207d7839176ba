"""PPO, SAO and GRPO on episodes of growing length whose only reward comes at the end, at equal generated tokens.

    python -m examples.long_horizon --quick   # minutes on two cores: one task, two lengths, one seed
    python -m examples.long_horizon           # hours: two tasks, three lengths, three seeds; SmolLM2 (fetched before)
    python -m examples.long_horizon --draw    # pictures of what is there

Every task and length is a comparison of its own (`longppo compare`), with its own report; started again, what is
finished is skipped and what is not goes on. The pictures over all lengths are written beside them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.long_horizon.pictures import write_study
from rl.compare import compare
from rl.config import ConfigError

HERE = Path(__file__).parent
ARMS = ("ppo", "sao", "grpo")
EXTRA = ("ppo_full", "ppo_lambda", "ppo_warmup")
"""At one length of each task: a critic trained whole, another lambda, a critic that is warmed up."""
TURN = {"recall": 10, "games": 64}
"""The most tokens of a question and its answer, and of a game: an episode must come to its end."""
KNOB = {"recall": "questions", "games": "rounds"}
WINDOW = 4096
"""Positions of the tiny policy; a prompt takes up to 128."""


SMOLLM2 = (
    "policy.path=models/smollm2",
    "policy.optimizer.lr=1e-5",
    "critic.optimizer.lr=5e-5",
    "prompts.source=task",
    "prompts.name=instructions",
    "prompts.chat=true",
    "prompts.max_prompt_tokens=96",
    "reward.function=rl.rewards.instructions:score",
    "rollout.max_turn_tokens=null",
    "rollout.max_response_tokens=48",
    "step.tokens_per_microbatch=1024",
)
"""What makes an arm one of configs/smollm2_ppo.yaml's task: a program checks a sentence."""


@dataclass(frozen=True)
class Study:
    """What is run."""

    lengths: dict[str, tuple[int, ...]]
    """Episode lengths in tokens, of each task; the arms of `EXTRA` run at the last."""
    seeds: int
    tokens_per_length: int
    """The budget of generated tokens is this times the length: equal numbers of episodes at every length."""
    whole: bool
    """Whether one seed of PPO and GRPO also fills the policy's window, and a real model joins at one length."""


FULL = Study({"recall": (64, 256, 1024), "games": (64, 256, 1024)}, seeds=3, tokens_per_length=640, whole=True)
QUICK = Study({"recall": (32, 128)}, seeds=1, tokens_per_length=140, whole=False)


@dataclass(frozen=True)
class Comparison:
    """One call of `longppo compare`."""

    name: str
    arms: Sequence[str]
    overrides: Sequence[str]
    seeds: int
    budget: int


def comparisons(study: Study) -> list[Comparison]:
    """The study's comparisons, the short ones first."""
    found = []
    for task, lengths in study.lengths.items():
        for length in lengths:
            arms = [*ARMS, *(EXTRA if length == lengths[-1] else ())]
            found.append(_comparison(task, length, arms, study.seeds, study.tokens_per_length))
    if study.whole:
        found.append(_comparison("recall", WINDOW - 128, ["ppo", "grpo"], 1, study.tokens_per_length // 4))
        found.append(Comparison("instructions-48", ARMS, SMOLLM2, study.seeds, 24_000))
    return sorted(found, key=lambda c: c.budget)


def _comparison(task: str, length: int, arms: Sequence[str], seeds: int, tokens_per_length: int) -> Comparison:
    overrides = [
        f"prompts.name=examples.long_horizon.tasks:{task}",
        f"prompts.knobs.{KNOB[task]}={length // TURN[task]}",
        f"rollout.max_response_tokens={length}",
    ]
    return Comparison(f"{task}-{length}", arms, overrides, seeds, tokens_per_length * length)


def main() -> int:
    """Run what is missing and draw; 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--draw", action="store_true", help="run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder (default: runs/long_horizon or runs/long_horizon_quick)")
    args = parser.parse_args()
    study = QUICK if args.quick else FULL
    out = args.out or Path("runs") / ("long_horizon_quick" if args.quick else "long_horizon")
    failed = 0
    for c in [] if args.draw else comparisons(study):
        print(f"== {c.name}", flush=True)
        sources = [str(HERE / f"{arm}.yaml") for arm in c.arms]
        failed |= compare(
            sources, c.overrides, seeds=c.seeds, budget=f"tokens={c.budget}", out=out / c.name, jobs=args.jobs
        )
    print("study: " + " ".join(map(str, write_study(out))))
    return failed


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        print(f"long_horizon: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
