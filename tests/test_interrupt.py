"""Ctrl-C on the command as a user starts it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest


@pytest.mark.slow
def test_ctrl_c_leaves_a_usable_run_and_no_process(tiny_policy_dir, tmp_path):
    command = [
        str(Path(sys.executable).parent / "longppo"),
        "train",
        "configs/ppo.yaml",
        f"policy.path={tiny_policy_dir}",
        f"run.out={tmp_path}",
        "run.steps=1000",
        "prompts.knobs.pairs=10",
        "step.prompts_per_step=4",
        "eval.prompts=4",
        "checkpoint.every=1",
    ]
    root = Path(__file__).parent.parent
    process = subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "step 2/" in line:
            break
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait() == 130
    assert "Traceback" not in rest
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
    run = tmp_path / "ppo-seed0"
    assert (run / "report.md").is_file()
    assert list((run / "checkpoints").glob("step-*/driver.json"))
    resumed = subprocess.run([*command, "run.resume=true", "run.steps=3"], cwd=root, capture_output=True, text=True)
    assert resumed.returncode == 0, resumed.stderr
