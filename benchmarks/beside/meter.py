"""CPU seconds of a command and of everything that it starts, read where its metrics.jsonl grows by a line."""

from __future__ import annotations

import re
import subprocess
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import psutil

POLL_S, SWEEP_S = 0.02, 2.0
"""How often the file is looked at, and the process tree: a process that ends takes along what it used since the last
look."""


@dataclass(frozen=True)
class Mark:
    """The end of a step: wall clock, and CPU seconds so far of every kind of process."""

    lines: int
    wall: float
    cpu: dict[str, float]


@dataclass
class Tree:
    """A process and its descendants, those that have ended included."""

    root: psutil.Process
    _seconds: dict[tuple[int, float], float] = field(default_factory=dict)
    _kinds: dict[tuple[int, float], str] = field(default_factory=dict)

    def look(self) -> dict[str, float]:
        """CPU seconds so far by kind of process."""
        for p in [self.root, *self.root.children(recursive=True)]:
            try:
                key, times = (p.pid, p.create_time()), p.cpu_times()
                self._seconds[key] = times.user + times.system
                self._kinds[key] = _kind(p, self._kinds.get(key))
            except psutil.NoSuchProcess:
                continue
        total: dict[str, float] = defaultdict(float)
        for key, seconds in self._seconds.items():
            total[self._kinds.get(key, "ended")] += seconds
        return dict(total)


def _kind(process: psutil.Process, known: str | None) -> str:
    """`ray::PolicyWorker`, `raylet`, `python`: a worker of Ray shows its actor in its title, and its method."""
    title = " ".join(process.cmdline()[:3])
    if found := re.match(r"ray::\w+", title):
        return known if known and known.startswith("ray::") and found[0] == "ray::IDLE" else found[0]
    script = re.search(r"([\w.-]+\.py)\b", title)
    return known or (script[1] if script else process.name())


def measure(command: list[str], metrics: Path, log: Path, env: dict[str, str], cwd: Path) -> list[Mark]:
    """Run the command to its end, a mark at the start and after every line of `metrics`.

    Raises RuntimeError, naming the log, if the command fails.
    """
    with log.open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=env, cwd=cwd)
        tree = Tree(psutil.Process(process.pid))
        marks = [Mark(0, time.perf_counter(), {})]
        size, looked = 0, time.perf_counter()
        while process.poll() is None:
            now = metrics.stat().st_size if metrics.exists() else 0
            if now > size and (lines := metrics.read_bytes().count(b"\n")) > marks[-1].lines:
                marks.append(Mark(lines, time.perf_counter(), tree.look()))
                size = now
            elif time.perf_counter() - looked > SWEEP_S:
                tree.look()
                looked = time.perf_counter()
            time.sleep(POLL_S)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}, see {log}")
    return marks
