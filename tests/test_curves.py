"""Runs read back from event files alone: whole, resumed, cut off; and seeds on one grid."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import RecordWriter

from rl.config import BudgetConfig, Config, ConfigError
from rl.curves import AXES, band, event_files, find_runs, read_run, whole_records
from rl.fairness import texts
from rl.telemetry import Telemetry

STEPS = 4


def write_run(root: Path, name: str = "ppo", seed: int = 0, first: int = 1, last: int = STEPS, **run) -> Path:
    """A run as training logs it: 100 tokens and 2 seconds a step; evaluated before the first and after every other."""
    config = Config()
    config.run.name, config.run.seed, config.run.steps, config.run.resume = name, seed, STEPS, first > 1
    for key, value in run.items():
        setattr(config.run, key, value)
    telemetry = Telemetry.open(root / f"{name}-seed{seed}", config)
    if first == 1:
        telemetry.log(0, [], {"eval/success": 0.25})
    for step in range(first, last + 1):
        spent = {"rollout/tokens": 100.0 * step, "policy/trained_tokens": 50.0 * step, "time/step": 2.0}
        telemetry.log(step, [], {"reward/mean": step / 10, **spent})
        if step % 2 == 0:
            scores = {"eval/scores": np.array([step / 10, 0.5])}
            telemetry.log(step, [], {"eval/success": 0.25 + step / 10}, scores)
    telemetry.close()
    return root / f"{name}-seed{seed}"


def test_a_run_from_its_event_files(tmp_path):
    log = read_run(write_run(tmp_path, "long-name", 12))
    assert (log.name, log.arm, log.seed, log.steps) == ("long-name-seed12", "long-name", 12, STEPS)
    assert log.cuts == ()
    assert log.spent() == {"generated_tokens": 400.0, "trained_tokens": 200.0, "seconds": 8.0}
    assert [log.against("eval/success", axis)[0].tolist() for axis in AXES] == [[0, 2, 4], [0, 200, 400], [0, 4, 8]]
    assert log.against("eval/success", "steps")[1] == pytest.approx([0.25, 0.45, 0.65])
    assert log.against("reward/mean", "seconds in steps")[0].tolist() == [2, 4, 6, 8]
    assert log.against("critic/error", "steps") is None
    assert log.span[0] <= log.span[1]


def test_a_resumed_run_has_one_value_for_each_step(tmp_path):
    write_run(tmp_path, last=3)
    log = read_run(write_run(tmp_path, first=3))
    assert len(event_files(tmp_path / "ppo-seed0")) == 2
    assert log.curves["reward/mean"].steps.tolist() == [1, 2, 3, 4]
    assert log.prompt_scores.tolist() == [0.4, 0.5]
    assert log.spent()["seconds"] == 8.0


def test_the_configuration_is_the_same_from_its_file_and_from_the_event_files(tmp_path):
    run = write_run(tmp_path, budget=BudgetConfig(generated_tokens=10**7))
    filed = read_run(run).config
    (run / "config.yaml").unlink()
    assert read_run(run).config == filed
    assert filed["run.budget.generated_tokens"] == "10000000"
    assert filed["run.budget.seconds"] == "null"
    assert {k: v for k, v in texts(Config()).items() if not k.startswith("run.")}.items() <= filed.items()


def test_event_files_alone_are_enough_wherever_they_lie(tmp_path):
    run = write_run(tmp_path)
    bare = tmp_path / "elsewhere" / "grpo-seed1"
    shutil.copytree(run / "tensorboard", bare)
    log = read_run(bare)
    assert (log.arm, log.seed, log.steps) == ("grpo", 1, STEPS)
    assert log.config == read_run(run).config


@pytest.mark.parametrize(
    ("fields", "missing"),
    [
        ({}, ""),
        ({"steps": 10}, "4 of 10 steps"),
        ({"steps": 10, "budget": BudgetConfig(generated_tokens=400)}, ""),
        ({"steps": 10, "budget": BudgetConfig(generated_tokens=401)}, "4 of 10 steps"),
        ({"steps": 10, "budget": BudgetConfig(trained_tokens=200)}, ""),
        ({"steps": 10, "budget": BudgetConfig(seconds=8.0)}, ""),
        ({"steps": 10, "budget": BudgetConfig(seconds=8.5)}, "4 of 10 steps"),
    ],
)
def test_whether_a_run_is_finished_is_what_its_configuration_says(tmp_path, fields, missing):
    assert read_run(write_run(tmp_path, **fields)).missing() == missing


@pytest.mark.parametrize("lost", [1, 7, 60])
def test_a_cut_event_file_is_read_up_to_the_cut_and_says_so(tmp_path, lost):
    run = write_run(tmp_path)
    (file,) = event_files(run)
    content = file.read_bytes()
    assert whole_records(file) == len(content)
    file.write_bytes(content[:-lost])
    log = read_run(run)
    assert log.curves["eval/success"].steps.tolist() == [0, 2]
    (said,) = log.cuts
    assert said.startswith("ppo-seed0: events.out.tfevents.")
    assert said.endswith(f" breaks off, read up to byte {whole_records(file)} of {len(content) - lost}")
    assert whole_records(file) < len(content) - lost


def test_a_tail_of_zeros_is_a_cut_too(tmp_path):
    run = write_run(tmp_path)
    (file,) = event_files(run)
    whole = file.stat().st_size
    file.write_bytes(file.read_bytes() + bytes(100))
    assert whole_records(file) == whole
    log = read_run(run)
    assert (log.steps, len(log.cuts)) == (STEPS, 1)


def test_records_are_counted_as_tensorboard_writes_them(tmp_path):
    file = tmp_path / "events.out.tfevents.1"
    with file.open("wb") as out:
        writer = RecordWriter(out)
        for step in range(3):
            writer.write(Event(step=step).SerializeToString())
        whole = out.tell()
        writer.write(Event(step=300).SerializeToString())
    content = file.read_bytes()
    for end in range(whole, len(content)):
        file.write_bytes(content[:end])
        assert whole_records(file) == whole


def test_runs_are_found_in_a_folder_of_runs(tmp_path):
    runs = [write_run(tmp_path, "ppo", seed) for seed in (0, 1)]
    (tmp_path / "ppo-seed2").mkdir()
    assert find_runs([tmp_path]) == runs
    assert find_runs([runs[1]]) == [runs[1]]
    with pytest.raises(ConfigError, match=r"^report: .*ppo-seed2 given, must be .* no event file is in it$"):
        find_runs([tmp_path / "ppo-seed2"])


def test_seeds_on_one_grid():
    """Against a loop: linear between a run's points, and no longer than the shortest run."""
    rng = np.random.default_rng(0)
    curves = [(np.cumsum(rng.random(n) + 0.1), rng.random(n)) for n in (5, 9, 300)]
    for points in (200, 3):
        found = band(curves, points)
        assert found.x[0] == max(x[0] for x, _ in curves)
        assert found.x[-1] == min(x[-1] for x, _ in curves)
        assert len(found.x) <= points
        for (x, y), row in zip(curves, found.seeds, strict=True):
            for at, value in zip(found.x, row, strict=True):
                after = next(i for i in range(len(x)) if x[i] >= at)
                if x[after] == at:
                    assert value == pytest.approx(y[after])
                else:
                    share = (at - x[after - 1]) / (x[after] - x[after - 1])
                    assert value == pytest.approx((1 - share) * y[after - 1] + share * y[after])
        assert found.mean == pytest.approx(found.seeds.sum(0) / 3)
    assert band([(np.array([0.0, 1.0]), np.zeros(2)), (np.array([2.0, 3.0]), np.zeros(2))]) is None
