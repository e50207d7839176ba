"""Telemetry: what was logged is there, once, whatever text it holds and however the run ended."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from matplotlib import colormaps
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rl import telemetry
from rl.config import Config, ConfigError
from rl.config_load import load
from rl.report import report, write_report
from rl.sample_tables import numbers, table, value_tables
from rl.telemetry import Lines, Telemetry, headline, read_jsonl, spread
from rl.trajectory import Trajectory

STEPS = 4


def trajectory(i: int, text: str = "b", **fields: Any) -> Trajectory:
    """A scored trajectory of three tokens."""
    t = Trajectory(
        prompt_index=i,
        sample_index=0,
        prompt_ids=np.arange(3, dtype=np.int32),
        response_ids=np.arange(3, dtype=np.int32),
        action_mask=np.ones(3, np.bool_),
        rollout_logprobs=np.zeros(3, np.float32),
        finish_reason="stop",
        policy_version=0,
        prompt_text="a",
        text=text,
        answer="b",
        score=float(i % 2),
    )
    return replace(t, **fields)


BATCH = [trajectory(i) for i in range(4)]


def write(directory: Path, first: int, last: int, config: Config | None = None, reward: float = 0.0) -> Telemetry:
    """Log steps `first` to `last`; the reward is `reward` plus the step."""
    t = Telemetry.open(directory, config or Config())
    for step in range(first, last + 1):
        t.log(step, BATCH, {"reward/mean": reward + step, "kl/reference": 0.5, "time/step": 2.0})
    return t


def events(directory: Path) -> EventAccumulator:
    """TensorBoard's own reading of a run."""
    found = EventAccumulator(str(directory / "tensorboard"))
    found.Reload()
    return found


def rewards_by_step(directory: Path) -> dict[int, float]:
    """The reward curve as TensorBoard reads it."""
    return {e.step: e.value for e in events(directory).Scalars("reward/mean")}


def test_worked_value_17_lone_surrogate_and_cjk(tmp_path: Path) -> None:
    text = "好 \ud800 寿司\r\n\u2028\x85 \U0001f600 \"'\\ \x00"
    t = Telemetry.open(tmp_path, Config())
    t.log(1, [trajectory(0, text, prompt_text=text, answer=text)], {"reward/mean": 0.0})
    t.close()
    (read,) = read_jsonl(tmp_path / "samples.jsonl")
    assert (read["prompt"], read["response"], read["answer"]) == (text, text, text)
    assert "寿司" in (tmp_path / "samples.jsonl").read_text(encoding="utf-8"), "legible, not escaped"
    assert "寿司" in events(tmp_path).Tensors("samples/train/text_summary")[0].tensor_proto.string_val[0].decode()


def test_what_was_logged_is_there_before_close(tmp_path: Path) -> None:
    write(tmp_path, 1, STEPS)  # and killed here
    assert rewards_by_step(tmp_path) == {s: float(s) for s in range(1, STEPS + 1)}
    assert [r["step"] for r in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(1, STEPS + 1))
    tags = events(tmp_path).Tags()
    assert {"histogram/train/reward", "histogram/train/response_tokens"} <= set(tags["histograms"])
    assert "samples/train/text_summary" in tags["tensors"]


def test_hyperparameters_are_in_the_runs_own_file(tmp_path: Path) -> None:
    config = Config()
    config.policy.optimizer.lr = 0.125
    write(tmp_path, 1, 1, config).close()
    plugin = events(tmp_path).summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"policy.optimizer.lr" in plugin
    assert len(list((tmp_path / "tensorboard").rglob("*tfevents*"))) == 1


def test_the_configuration_reads_back(tmp_path: Path) -> None:
    config = Config()
    config.policy.path = str(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    Telemetry.open(tmp_path / "run", config).close()
    assert load(str(tmp_path / "run/config.yaml"), []).policy.path == str(tmp_path)


def test_a_resumed_run_has_one_value_for_every_step(tmp_path: Path) -> None:
    write(tmp_path, 1, STEPS).close()
    config = Config()
    config.run.resume = True
    resumed = write(tmp_path, 3, STEPS + 1, config, reward=100)
    resumed.close()
    expected = {1: 1.0, 2: 2.0, 3: 103.0, 4: 104.0, 5: 105.0}
    assert rewards_by_step(tmp_path) == expected
    assert {step: m["reward/mean"] for step, m in resumed.history} == expected
    for name, each in (("metrics.jsonl", 1), ("samples.jsonl", len(BATCH))):
        assert [r["step"] for r in read_jsonl(tmp_path / name)] == [s for s in expected for _ in range(each)]


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    Telemetry.open(tmp_path, Config()).close()
    write(tmp_path, 1, 1).close()  # nothing had been logged: it may start
    with pytest.raises(ConfigError, match=r"run.name: 'ppo' with run.seed 0 given, but .* run.resume=true"):
        Telemetry.open(tmp_path, Config())


def test_a_line_cut_by_a_kill_does_not_lose_the_others(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert list(read_jsonl(path)) == [{"step": 1}, {"step": 2}]


def test_resuming_after_a_cut_line_leaves_a_file_that_reads(tmp_path: Path) -> None:
    write(tmp_path, 1, 2).close()
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 3, "rew')
    config = Config()
    config.run.resume = True
    write(tmp_path, 3, 4, config).close()
    assert [r["step"] for r in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert {r["step"] for r in read_jsonl(tmp_path / "samples.jsonl")} == {1, 2, 3, 4}


def test_the_table_holds_any_text() -> None:
    rows = table([trajectory(1, "a | b\n<script> *x* \ud800")]).split("\n")
    assert len(rows) == 3
    assert all(row.count("|") == 6 for row in rows)
    assert "<script>" not in rows[2]
    rows[2].encode()  # what a protobuf string demands


JUDGED = {
    "values": np.array([0.0, 0.5, 1.0, 9.0], np.float32),
    "advantages": np.array([1.0, -0.5, 0.25], np.float32),
    "action_mask": np.array([True, False, True]),
    "score": 1.0,
}


def test_values_stand_under_their_tokens() -> None:
    """Bars between the lowest and highest value of an action; the value after the last token is no token's."""
    told = value_tables([trajectory(1, **JUDGED)], lambda ids: ["a|", "\n", "</s>"][: len(ids)])
    assert told.split("\n\n")[1].splitlines() == [
        "| token | a&#124; | *⏎* | &lt;/s&gt; |",
        "|---|---|---|---|",
        "|  | ▁ | ▅ | █ |",
        "| value | 0.00 | 0.50 | 1.00 |",
        "| advantage | +1.00 | -0.50 | +0.25 |",
        "| reward |  |  | 1 |",
    ]
    assert told.startswith("score 1, stop, after `a`")


@pytest.mark.filterwarnings("ignore:html5lib's sanitizer:DeprecationWarning")
def test_tensorboard_keeps_the_table() -> None:
    """Its own cleaning of markdown, which takes styles and colours away."""
    from tensorboard.plugin_util import markdown_to_safe_html

    page = markdown_to_safe_html(value_tables([trajectory(1, **JUDGED), trajectory(2, **JUDGED)], numbers))
    assert page.count("<table>") == 2
    assert "<th><em>1</em></th>" in page
    for cell in ("█", "0.50", "-0.50"):
        assert page.count(f"<td>{cell}</td>") == 2


def test_an_environments_rewards_stand_where_they_were_paid() -> None:
    paid = JUDGED | {"token_rewards": np.array([0.5, 0, 0.5], np.float32)}
    assert "| reward | 0.5 |  | 0.5 |" in value_tables([trajectory(1, **paid)], numbers)


def test_long_responses_break_into_lines_and_lose_their_middle() -> None:
    n = 100
    long = trajectory(
        1, response_ids=np.arange(n), action_mask=np.ones(n, bool), values=np.linspace(0, 1, n + 1), score=None
    )
    told = value_tables([long], numbers)
    heads = [line for line in told.splitlines() if line.startswith("| token")]
    assert [len(head.split("|")) - 3 for head in heads] == [16] * 4
    assert [heads[1].split(" | ")[-1], heads[2].split(" | ")[1]] == ["31 |", "68"]


def test_values_are_in_the_event_files_as_text_and_as_a_picture(tmp_path: Path) -> None:
    t = Telemetry.open(tmp_path, Config(), lambda ids: [f"{i}\ud800$" for i in ids])
    t.log(1, [trajectory(0, **JUDGED), trajectory(1)], {"reward/mean": 0.0})
    t.close()
    assert (
        "| value | 0.00 |"
        in events(tmp_path).Tensors("samples/values/text_summary")[0].tensor_proto.string_val[0].decode()
    )
    (png,) = events(tmp_path).Images("samples/values")
    pixels = matplotlib.image.imread(io.BytesIO(png.encoded_image_string))[..., :3]
    red, green = (np.isclose(pixels, colormaps["RdYlGn"](x)[:3], atol=0.02).all(-1).sum() for x in (0.15, 0.85))
    assert min(red, green) > 500, "the lowest value is red, the highest green"
    write(tmp_path / "grpo", 1, 1).close()
    assert "samples/values" not in events(tmp_path / "grpo").Tags()["images"], "no critic, no values"


def test_samples_come_from_all_over_the_step() -> None:
    batch = [trajectory(i) for i in range(100)]
    assert [t.prompt_index for t in spread(batch, 4)] == [0, 25, 50, 75]
    assert len(spread(batch[:3], 4)) == 3


def test_plain_lines_where_stderr_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    lines = Lines(10, "ppo", out)
    times = iter([100.0, 130.0, 160.0])
    monkeypatch.setattr(telemetry.time, "monotonic", lambda: next(times))
    lines.show(1, {"reward/mean": 0.25, "kl/reference": 0.01, "time/tokens_per_second": 123.4})
    lines.show(2, {"reward/mean": 0.5})
    lines.expect(5)
    lines.show(3, {"reward/mean": 0.5})
    assert out.getvalue().splitlines() == [
        "ppo  step 1/10  reward 0.250  kl 0.0100  123 tok/s",
        "ppo  step 2/10  reward 0.500  left 04:00",
        "ppo  step 3/5  reward 0.500  left 01:00",
    ]


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(telemetry.sys.stderr, "isatty", lambda: True, raising=False)
    bar = telemetry.progress(10, "ppo")
    bar.show(5, {"eval/success": 0.125})
    bar.expect(8)
    bar.show(6, {"reward/mean": 0.5})
    bar.close()
    shown = capsys.readouterr().err
    assert "eval 0.125" in shown
    assert "6/8" in shown
    assert headline({"reward/mean": 0.5}) in shown


def test_an_alert_is_said_when_it_begins_and_when_it_comes_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    t = write(tmp_path, 1, 1)
    for step, kinds in enumerate([{"a"}, {"a", "b"}, set(), {"a"}], 1):
        t.alert(step, {kind: f"{kind} is wrong" for kind in kinds})
    t.close()
    said = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert said == [f"longppo: warning: step {s}: {kind} is wrong" for s, kind in ((1, "a"), (2, "b"), (4, "a"))]
    assert [e.step for e in events(tmp_path).Tensors("alerts/a/text_summary")] == [1, 4]


def test_the_report_tells_start_and_end(tmp_path: Path) -> None:
    history = [
        (0, {"eval/success": 0.25, "eval/truncated": 0.5}),
        (1, {"reward/mean": 0.2, "time/step": 4.0, "time/rollout": 1.0}),
        (2, {"reward/mean": 0.6, "time/step": 4.0, "time/rollout": 1.0}),
        (2, {"eval/success": 0.75, "eval/truncated": 0.0}),
    ]
    text = write_report(tmp_path, history).read_text()
    assert "2 steps, 00:08 spent in them" in text
    assert "0.250 at step 0, 0.750 at step 2 (+0.500)" in text
    assert "| reward/mean | 0.2 | 0.6 | 0.4 |" in text
    assert "| time/rollout | 25.0% |" in text


def test_an_interrupted_run_has_a_report_too() -> None:
    assert any("0 steps" in line for line in report("run", []))


def test_metrics_are_plain_json(tmp_path: Path) -> None:
    write(tmp_path, 1, 1).close()
    first = json.loads((tmp_path / "metrics.jsonl").read_text().split("\n")[0])
    assert first == {"step": 1, "reward/mean": 1.0, "kl/reference": 0.5, "time/step": 2.0}
