"""`longppo compare` and `longppo report`: what is refused, what is run, skipped and reported, and what is claimed."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import sys

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

import rl.compare
from rl import cli, compare_report
from rl.compare import Job, Terminated, check_arms, last_error, load_arms, run_all
from rl.compare_report import comparison
from rl.config import BudgetConfig, Config, ConfigError
from rl.curves import Curve, RunLog, event_files
from rl.document import Heading, Table, Text, markdown, webpage
from rl.fairness import texts
from tests.test_curves import STEPS, write_run


@pytest.fixture
def arms(tmp_path):
    """Two files that make a fair comparison; `policy` passes for a model."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "ppo.yaml").write_text(f"policy: {{path: {tmp_path}/model}}\nrun: {{name: ppo, steps: {STEPS}}}\n")
    (tmp_path / "grpo.yaml").write_text(
        "extends: ppo.yaml\nrun: {name: grpo}\nalgorithm: {name: grpo, whiten: false}\n"
        "step: {prompts_per_step: 16, samples_per_prompt: 8}\n"
    )
    return [str(tmp_path / "ppo.yaml"), str(tmp_path / "grpo.yaml")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run.name=x"], r"run\.name: 'x' given by .*ppo\.yaml and .*grpo\.yaml, must be a name for each arm"),
        (["run.seed=1"], r"run\.seed: given as an override, must be left to compare"),
        (["run.sed=1"], r".*ppo\.yaml: run\.sed: unknown key, did you mean run\.seed\?"),
        (["--budget", "tokens=2047"], r".*ppo\.yaml: run\.budget\.generated_tokens: 2047 given, must be at least 2048"),
        (["--budget", "tokens=8193"], r".*ppo\.yaml: run\.steps: 4 given, must be at least 5: .* the budget is 8193"),
        (["--budget", "hours=1"], r"--budget: 'hours=1' given, must be one of tokens=NUMBER, trained_tokens=NUMBER"),
        (["--seeds", "0"], r"--seeds: 0 given, must be at least 1"),
        (["--jobs", "0"], r"--jobs: 0 given, must be at least 1"),
    ],
)
def test_what_is_no_comparison_is_refused_in_one_line_before_anything_starts(arms, tmp_path, capsys, words, said):
    assert cli.main(["compare", *arms, "--out", str(tmp_path / "out"), *words]) == 2
    out, err = capsys.readouterr()
    assert re.fullmatch(f"longppo: {said}.*\n", err)
    assert out == ""
    assert not (tmp_path / "out").exists()


def test_one_arm_is_no_comparison(arms, capsys):
    assert cli.main(["compare", arms[0], "run.steps=3"]) == 2
    assert capsys.readouterr().err == "longppo: compare: 1 configuration given, must be at least 2\n"


@pytest.mark.parametrize(
    "line",
    [
        "prompts: {seed: 1}",
        "prompts: {knobs: {pairs: 7}}",
        "eval: {prompts: 9}",
        "reward: {function: 'a:b'}",
        "policy: {lora: {rank: 4}}",
        "rollout: {temperature: 0.5}",
        "rollout: {max_response_tokens: 8}",
    ],
)
def test_arms_that_differ_in_what_must_be_equal_are_refused_with_the_key(arms, tmp_path, line):
    section, key = re.findall(r"\w+", line)[:2]
    with (tmp_path / "grpo.yaml").open("a") as file:
        file.write(line)
    loaded = load_arms(arms, [])
    with pytest.raises(ConfigError, match=rf"^{section}\.{key}.* \(ppo .+, grpo .+\): the arms differ, must be equal"):
        check_arms(loaded, allow_different=False)
    check_arms(loaded, allow_different=True)


def test_without_a_budget_the_number_of_steps_is_one(arms, tmp_path):
    (tmp_path / "grpo.yaml").write_text((tmp_path / "grpo.yaml").read_text().replace("grpo}", "grpo, steps: 5}", 1))
    with pytest.raises(ConfigError, match=r"^run\.steps \(ppo 4, grpo 5\): the arms differ"):
        check_arms(load_arms(arms, []), allow_different=False)
    check_arms(load_arms(arms, ["run.budget.generated_tokens=4096"]), allow_different=False)


@pytest.fixture
def trainer(monkeypatch, tmp_path):
    """In place of training a process that leaves a run's event files, or fails with `fail` in its name's file."""
    template = write_run(tmp_path / "template")
    fake = tmp_path / "fake.py"
    fake.write_text(f"""
import pathlib, re, shutil, sys
config, *words = sys.argv[1:]
words = dict(word.split("=") for word in words)
arm = pathlib.Path(config).stem
name = arm + "-seed" + words["run.seed"]
out = pathlib.Path(words["run.out"]) / name
with open({str(tmp_path / "calls")!r}, "a") as calls:
    print(name, words["run.resume"], file=calls)
shutil.copytree({str(template / "tensorboard")!r}, out / "tensorboard", dirs_exist_ok=True)
shutil.copy(config, out / "config.yaml")
if (pathlib.Path({str(tmp_path)!r}) / ("fail-" + name)).exists():
    print("Traceback ...", "longppo: warning: not this", "longppo: reward f raised", "ray: bye", sep="\\n")
    sys.exit(1)
(out / "policy").mkdir()
(out / "policy/tokenizer_config.json").touch()
""")
    planned = rl.compare.plan_job

    def plan(arm, seed, out):
        job = planned(arm, seed, out)
        assert job.command[1:5] == ["-P", "-m", "rl.cli", "train"]
        return dataclasses.replace(job, command=[sys.executable, "-S", str(fake), *job.command[5:]])

    monkeypatch.setattr(rl.compare, "plan_job", plan)
    monkeypatch.setattr(compare_report, "curves_png", lambda *_: None)

    def calls():
        """The runs started since the last question."""
        file = tmp_path / "calls"
        started = file.read_text().split("\n")[:-1] if file.exists() else []
        file.unlink(missing_ok=True)
        return sorted(started)

    return calls


def test_every_run_is_made_once_and_what_is_missing_is_made_later(arms, tmp_path, trainer, capsys):
    command = [
        "compare",
        *arms,
        "--seeds",
        "2",
        "--out",
        str(tmp_path / "out"),
        "--jobs",
        "2",
        "policy.optimizer.lr=0.5",
    ]
    every = [f"{arm}-seed{seed} true" for arm in ("grpo", "ppo") for seed in (0, 1)]
    assert cli.main(command) == 0
    assert trainer() == every
    assert "lr: 0.5" in (tmp_path / "out/configs/grpo.yaml").read_text()
    for report in ("report.md", "report.html"):
        assert (tmp_path / "out" / report).is_file()
        assert str(tmp_path / "out" / report) in capsys.readouterr().out or report == "report.html"
    assert cli.main(command) == 0
    assert trainer() == []
    shutil.rmtree(tmp_path / "out/ppo-seed1/policy")
    assert cli.main(command) == 0
    assert trainer() == ["ppo-seed1 true"]
    assert cli.main([*command, "--seeds", "3"]) == 0
    assert trainer() == ["grpo-seed2 true", "ppo-seed2 true"]


def test_a_failed_run_is_reported_and_stops_no_other(arms, tmp_path, trainer, capsys):
    (tmp_path / "fail-ppo-seed0").touch()
    command = ["compare", *arms, "--seeds", "2", "--out", str(tmp_path / "out")]
    assert cli.main(command) == 1
    assert len(trainer()) == 4
    log = tmp_path / "out/ppo-seed0.log"
    assert f"longppo: ppo-seed0 failed: reward f raised (log: {log})" in capsys.readouterr().err
    report = (tmp_path / "out/report.md").read_text()
    assert "4 runs, 3 of them finished. Not finished, and in no mean of this report: ppo-seed0." in report
    assert f"| ppo-seed0 | {STEPS} | 0.65 | failed after step {STEPS}: reward f raised |" in report
    assert "| ppo | 1 |" in report
    (tmp_path / "fail-ppo-seed0").unlink()
    assert cli.main(command) == 0
    assert trainer() == ["ppo-seed0 true"]
    assert "4 runs, 4 of them finished." in (tmp_path / "out/report.md").read_text()


def test_runs_made_with_other_keys_are_not_mixed_in(arms, tmp_path, trainer, capsys):
    command = ["compare", *arms, "--seeds", "1", "--out", str(tmp_path / "out")]
    assert cli.main(command) == 0
    assert cli.main([*command, "policy.optimizer.lr=0.5"]) == 2
    assert "ppo-seed0 was made with another policy.optimizer.lr, must be another folder" in capsys.readouterr().err
    assert cli.main([*command, "checkpoint.keep=5"]) == 0
    assert len(trainer()) == 2


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_a_signal_reaches_the_runs_once_and_no_other_starts(tmp_path, monkeypatch, number, raised):
    """The runs are not in this process's group: what ends this one must be handed on, or they go on alone."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    code = f"""
import signal, sys
def ended(number, frame):
    open({str(tmp_path)!r} + "/" + sys.argv[1], "a").write(signal.Signals(number).name)
    sys.exit(130)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, ended)
open({str(fifo)!r}, "w").write("ready")
signal.pause()
"""
    jobs = [
        Job(name, tmp_path, [sys.executable, "-S", "-c", code, name], tmp_path / f"{name}.log") for name in ("a", "b")
    ]

    def signalled(futures):
        with fifo.open() as ready:
            assert ready.read() == "ready"
        if number == signal.SIGINT:
            raise KeyboardInterrupt  # Python's own doing, unless a shell started us with the signal ignored
        signal.raise_signal(number)
        return []

    monkeypatch.setattr(rl.compare, "as_completed", signalled)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(raised):
        run_all(jobs, 1, 2)
    assert (tmp_path / "a").read_text() == number.name
    assert not (tmp_path / "b").exists()
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("longppo: a\nTraceback\n", 1, "a"),
        ("Traceback\n\nZeroDivisionError: ours\n\n", 1, "ZeroDivisionError: ours"),
        ("longppo: warning: x\n", 3, "warning: x"),
        ("", 3, "exit code 3"),
        ("step 1\n", -9, "killed by signal 9"),
    ],
)
def test_the_last_error_line(tmp_path, text, code, said):
    (tmp_path / "log").write_text(text)
    assert last_error(tmp_path / "log", code) == said


def log_of(arm: str, seed: int, final: float, config: Config | None = None, first: float = 0.2, **fields) -> RunLog:
    """A run of four steps whose success goes in a line from `first` to `final`, at 100 tokens and 2 seconds a step."""
    config, steps = config or Config(), np.arange(STEPS + 1.0)
    config.run.steps = STEPS
    training = {
        "rollout/tokens": 100 * steps[1:],
        "time/step": np.full(STEPS, 2.0),
        "memory/policy": 1 + steps[1:],
    } | fields.pop("metrics", {})
    curves = {name: Curve(steps[1:], np.asarray(values)) for name, values in training.items()}
    curves["eval/success"] = Curve(steps, np.linspace(first, final, STEPS + 1))
    return RunLog(f"{arm}-seed{seed}", arm, seed, curves, fields.pop("config_texts", texts(config)), **fields)


@pytest.fixture
def told(monkeypatch):
    """A report's text, and its tables as {first column: {head: cell}}, without pictures."""
    monkeypatch.setattr(compare_report, "curves_png", lambda *_: None)

    def tell(logs, failures=None):
        blocks = comparison(logs, failures)
        tables = [b for b in blocks if isinstance(b, Table)]
        return " ".join(b.text for b in blocks if isinstance(b, Text)), {
            t.head[0]: {row[0]: dict(zip(t.head, row, strict=True)) for row in t.rows} for t in tables
        }

    return tell


def test_the_tables_of_a_report(told):
    """By hand: starts .2, bests .6 and 1.0, so the threshold is .2 + .9 * .4 = .56."""
    logs = [log_of("a", s, f) for s, f in enumerate((0.5, 0.6, 0.7))] + [
        log_of("b", s, 1.0, metrics={"memory/critic": [2, 3, 4, 3.5], "grpo/groups_drawn": [5, 6, 7, 8]})
        for s in (0, 1)
    ]
    text, tables = told(logs)
    assert "Threshold: eval/success = 0.56, which is" in text
    row = tables["arm"]["a"]
    assert (row["seeds"], row["first"], row["tokens to threshold"]) == ("3", "0.2", "350 (2 of 3 seeds)")
    assert row["final"].startswith("0.6 [0.5")
    assert row["seconds to threshold"] == "7 (2 of 3 seeds)"
    assert tables["arm"]["b"]["tokens to threshold"] == "200"
    cost = tables["mean over seeds"]
    assert cost["peak memory/policy, GiB"] == {"mean over seeds": "peak memory/policy, GiB", "a": "5", "b": "5"}
    assert (cost["peak memory/critic, GiB"]["a"], cost["peak memory/critic, GiB"]["b"]) == ("-", "4")
    assert (cost["prompts drawn"]["a"], cost["prompts drawn"]["b"]) == ("128", "26")
    assert (cost["tokens per second"]["a"], cost["generated tokens"]["b"]) == ("50", "400")
    assert tables["difference"]["a - b"]["final"].startswith("-0.4 [-0.5")
    assert "same number in every arm" in text


def test_three_seeds_are_described_and_ten_are_tested(told):
    def arms(n):
        return [log_of(arm, s, level + s / 100) for arm, level in (("a", 0.3), ("b", 0.9)) for s in range(n)]

    for seeds in (3, 9):
        text, tables = told(arms(seeds))
        assert "a statement of significance needs 10 seeds of each arm and is not made" in text
        assert "ignificantly" not in text
        assert tables["difference"]["a - b"]["p"].startswith("not tested")
    text, tables = told(arms(10))
    assert "Significantly different at the 0.05 level: a and b." in text
    assert float(tables["difference"]["a - b"]["p"]) < 0.001
    text, _ = told([log_of(arm, s, 0.5 + s / 100) for arm in "ab" for s in range(10)])
    assert "No two arms differ significantly" in text


def test_unfinished_and_failed_runs_are_named_and_in_no_mean(told):
    longer = Config()
    logs = [log_of("a", 0, 0.5), log_of("a", 1, 0.9, longer), log_of("b", 0, 0.5)]
    logs[1].config["run.steps"] = "8"
    text, tables = told(logs, {"b-seed1": "no memory"})
    assert "4 runs, 2 of them finished. Not finished, and in no mean of this report: a-seed1, b-seed1." in text
    assert tables["arm"]["a"]["seeds"] == "1"
    assert tables["run"]["a-seed1"]["state"] == "4 of 8 steps"
    assert tables["run"]["b-seed1"]["state"] == "failed before its first number: no memory"


def test_an_arm_of_which_nothing_finished_is_in_title_and_tables(monkeypatch):
    """One arm failed before its first number, another in the middle."""
    monkeypatch.setattr(compare_report, "curves_png", lambda *_: None)
    blocks = comparison([log_of("a", 0, 0.5), log_of("c", 0, 0.5)], {"b-x-seed0": "no memory", "c-seed0": "no"})
    assert blocks[0].text == "Comparison: a, c, b-x"
    tables = {b.head[0]: b for b in blocks if isinstance(b, Table)}
    assert [row[:4] for row in tables["arm"].rows[1:]] == [("c", "0", "-", "-"), ("b-x", "0", "-", "-")]
    assert tables["mean over seeds"].head == ("mean over seeds", "a", "c", "b-x")
    assert all(row[2:] == ("-", "-") for row in tables["mean over seeds"].rows)


def test_pairs_over_prompts_speak_of_policies_and_not_of_methods(told):
    rng = np.random.default_rng(0)
    hard = rng.random(256)

    def arms(shift):
        scores = {arm: hard + rng.normal(0, 0.1, (2, 256)) + (shift if arm == "b" else 0) for arm in "ab"}
        return [log_of(arm, s, 0.5, prompt_scores=scores[arm][s]) for arm in "ab" for s in (0, 1)]

    text, tables = told(arms(0.1))
    assert "policies that these very runs ended with differ at the 0.05 level: a and b. What other seeds" in text
    assert float(tables["difference"]["a - b"]["p over prompts"]) < 0.001
    text, tables = told(arms(0.0))
    assert "differ at the 0.05 level: no two arms." in text
    for unlike in ({"prompt_scores": None}, {"prompt_scores": np.zeros(9)}, {"config_texts": {"prompts.seed": "1"}}):
        text, tables = told([*arms(0.1), log_of("b", 2, 0.5, **{"prompt_scores": np.zeros(256)} | unlike)])
        assert tables["difference"]["a - b"]["p over prompts"] == "not known"
        assert "Prompt by prompt" not in text


def test_what_was_not_equal_is_said(told):
    other, slow = Config(), Config()
    other.prompts.seed, slow.policy.optimizer.lr = 5, 0.25
    text, tables = told([log_of("a", 0, 0.5), log_of("a", 1, 0.5, slow), log_of("b", 0, 0.6, other, first=0.25)])
    assert "Not a fair comparison: the arms differ in prompts.seed." in text
    assert "Runs of a differ among each other in policy.optimizer.lr" in text
    assert "differ between arms at equal seed by up to 0.05" in text
    assert tables["differs"] == {"prompts.seed": {"differs": "prompts.seed", "a": "0", "b": "5"}}
    assert tables["equal in all arms"]["eval.prompts"]["value"] == "256"
    assert "prompts.seed" not in tables["equal in all arms"]
    text, _ = told([log_of("a", 0, 0.5, config_texts={}, cuts=("a-seed0: x breaks off",))])
    assert "No configuration was found for a-seed0." in text
    assert "Not whole: a-seed0: x breaks off." in text


def test_who_did_not_spend_the_budget_is_said(told):
    def budget(tokens):
        config = Config()
        config.run.budget = BudgetConfig(generated_tokens=tokens)
        return config

    text, _ = told([log_of("a", 0, 0.5, budget(400)), log_of("b", 0, 0.5, budget(400))])
    assert "Budget of a run: 400 generated tokens. A run ends" in text
    text, _ = told([log_of("a", 0, 0.5, budget(401)), log_of("b", 0, 0.5, budget(401))])
    assert "Ended by run.steps before they spent it: a-seed0, b-seed0." in text


def test_runs_that_overlap_in_time_are_said(told):
    a, b, c = (log_of(arm, 0, 0.5, span=span) for arm, span in (("a", (0, 10)), ("b", (9, 20)), ("c", (20, 30))))
    assert "Runs overlapped in time" in told([a, b, c])[0]
    assert "No two runs overlapped in time" in told([a, c])[0]


def test_nothing_but_failures_still_makes_a_report(told):
    text, tables = told([], {"a-seed0": "no"})
    assert "1 runs, 0 of them finished." in text
    assert tables["run"]["a-seed0"]["state"] == "failed before its first number: no"


def test_a_report_of_runs_from_event_files_alone(tmp_path, capsys):
    """Two arms of two seeds, no configuration files, one event file cut off; pictures and TensorBoard's overlay too."""
    runs = [write_run(tmp_path, name, seed) for name in ("ppo", "grpo") for seed in (0, 1)]
    for run in runs:
        (run / "config.yaml").unlink()
    (file,) = event_files(runs[0])
    file.write_bytes(file.read_bytes()[:-3])
    for _ in range(2):  # the second replaces the first
        assert cli.main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith(f"report: {tmp_path}/report.md {tmp_path}/report.html\n")
    text = (tmp_path / "report.md").read_text()
    assert "Not whole: ppo-seed0: events.out.tfevents." in text
    assert "| grpo | 2 | 0.25 | 0.65 [0.65, 0.65] |" in text
    pictures = re.findall(r"\]\((.*\.png)\)", text)
    assert pictures == ["curves_steps.png", "curves_generated_tokens.png", "curves_seconds_in_steps.png"]
    for name in pictures:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "report.html").read_text()
    assert page.count('src="data:image/png;base64,') == 3
    assert not re.search(r"<script|https?:|<link", page)
    overlay = EventAccumulator(str(tmp_path / "overlay" / "grpo"))
    overlay.Reload()
    assert [(e.step, e.value) for e in overlay.Scalars("eval/success_mean")] == [
        (0, 0.25),
        (2, pytest.approx(0.45)),
        (4, pytest.approx(0.65)),
    ]
    assert overlay.Scalars("eval/success_low")
    layout = EventAccumulator(str(tmp_path / "overlay"))
    layout.Reload()
    charts = Layout.FromString(layout.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    found = {chart.title: chart.margin.series[0] for category in charts.category for chart in category.chart}
    success = found["eval/success"]
    assert [success.value, success.lower, success.upper] == [f"eval/success_{x}" for x in ("mean", "low", "high")]


def test_a_report_is_refused_where_it_would_hide_something(tmp_path, capsys):
    a, b = write_run(tmp_path / "x"), write_run(tmp_path / "y")
    assert cli.main(["report", str(a), str(b)]) == 2
    assert cli.main(["report", str(a), "--out", str(a)]) == 2
    twice, folder = capsys.readouterr().err.splitlines()[-2:]
    assert twice == "longppo: report: ppo-seed0 given twice, must be runs with a name and seed each"
    assert folder.startswith(f"longppo: --out: {a} given, must be another folder than a run's")


def test_text_reaches_a_document_as_it_is():
    blocks = [Heading("a < b", 1), Table(("x|y",), [("<b>&",)])]
    assert markdown(blocks) == "# a < b\n\n| x\\|y |\n| --- |\n| <b>& |\n"
    assert "<h1>a &lt; b</h1>" in webpage(blocks)
    assert "<td>&lt;b&gt;&amp;</td>" in webpage(blocks)


def test_seeds_change_sampling_and_arms_draw_from_one_stream():
    """PPO with another seed sees the same prompts; GRPO, which draws an eighth as many, sees the first of them."""
    from rl.config_load import load
    from rl.prompts import PromptSource
    from rollout.engine import request_seed

    ppo, other, grpo = (
        PromptSource.open(load(f"configs/{name}.yaml", [f"run.seed={seed}"]))
        for name, seed in (("ppo", 0), ("ppo", 1), ("grpo", 1))
    )
    drawn, same, groups = ppo.next(64), other.next(64), grpo.next(8)
    assert [p.ids.tolist() for p in drawn] == [p.ids.tolist() for p in same]
    assert [p.ids.tolist() for p in drawn[:8]] == [p.ids.tolist() for p in groups]
    held_out = [[(p.index, p.ids.tolist()) for p in source.held_out(8)] for source in (ppo, other, grpo)]
    assert held_out[0] == held_out[1] == held_out[2]
    assert request_seed(0, 1, 2, 3) != request_seed(1, 1, 2, 3)


def test_the_first_evaluation_asks_every_arm_the_same():
    """The same tokens with the same sampling seeds, whatever the arm and the step: one policy then gives one number."""
    from rl.config_load import load
    from rl.evaluation import evaluate
    from rl.prompts import PromptSource
    from rollout.engine import Sample
    from rollout.pool import RolloutPool

    def asked(name, seed):
        config, seen = load(f"configs/{name}.yaml", [f"run.seed={seed}", "eval.prompts=8", "eval.samples=2"]), []

        class Asked(RolloutPool):
            def _ask(self, requests):
                seen.extend(requests[0])
                sample = Sample(np.zeros(1, np.int32), np.zeros(1, np.float32), "stop", "", 0)
                return [[sample] * len(share) for share in requests]

        pool = Asked(config, [None], ["engine"], {})
        held_out = PromptSource.open(config).held_out(config.eval.prompts)
        evaluate(pool, held_out, lambda batch: [0.0] * len(batch), config.eval)
        return seen

    ppo, sao, grpo, other = asked("ppo", 3), asked("sao", 3), asked("grpo", 3), asked("ppo", 4)
    assert len(ppo) == 8 * 2 + 8
    assert ppo == sao == grpo
    assert [r.prompt_ids for r in other] == [r.prompt_ids for r in ppo]
    assert not {r.seed for r in other} & {r.seed for r in ppo}
    assert len({r.seed for r in ppo[:16]}) == 16
