"""What every benchmark prints beside its ratio: the machine it ran on, and whether each bar was met."""

import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import psutil

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SWARM = [sys.executable, "-m", "launch"]
"""The `swarm` command, in the Python that runs the benchmark."""


def describe() -> str:
    """The machine and its load in a few lines."""
    memory = psutil.virtual_memory()
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "pyzmq", "numpy"))
    load = ", ".join(f"{average:.2f}" for average in os.getloadavg())
    return (
        f"machine   {_processor()}, {psutil.cpu_count()} cores, {memory.total / 2**30:.1f} GiB "
        f"({memory.available / 2**30:.1f} free), {platform.system()} {platform.release()}\n"
        f"software  Python {platform.python_version()}, {packages}\n"
        f"when      {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, load average {load}, "
        f"{_busy_share():.0%} of the processors busy with other work"
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _busy_share() -> float:
    return float(psutil.cpu_percent(interval=0.5)) / 100


@dataclass
class Bars:
    """The bars of one benchmark: each is printed as it is measured, and decides about the exit status."""

    failed: list[str] = field(default_factory=list)

    def at_least(self, what: str, value: float, bar: float, unit: str = "") -> None:
        self._hold(what, value >= bar, f"{value:,.6g}{unit}, at least {bar:,.6g}{unit}")

    def at_most(self, what: str, value: float, bar: float, unit: str = "") -> None:
        self._hold(what, value <= bar, f"{value:,.6g}{unit}, at most {bar:,.6g}{unit}")

    def equal(self, what: str, value: object, bar: object) -> None:
        self._hold(what, value == bar, f"{value}, must be {bar}")

    def _hold(self, what: str, holds: bool, seen: str) -> None:
        print(f"{'PASS' if holds else 'FAIL'}  {what}: {seen}", flush=True)
        if not holds:
            self.failed.append(what)

    def exit(self) -> None:
        """End the benchmark: status 0 when every bar was met."""
        sys.exit(1 if self.failed else 0)


@dataclass(frozen=True)
class Usage:
    """What a command took: its exit status, and the largest of what was seen of its process tree."""

    status: int
    wall_s: float
    output: str
    processes: int
    pss_mib: float
    own_mib: dict[int, float]
    """Private memory of each process at its largest, by process id."""


def watch(command: Sequence[str], log: Path, interval_s: float = 0.2, *, memory: bool = True) -> Usage:
    """Run a command to its end, its output into a file, and sample its process tree."""
    began = time.monotonic()
    processes, pss, own = 0, 0.0, dict[int, float]()
    with log.open("w") as output:
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        while True:
            if memory:
                tree = _tree(child.pid)
                sizes = {pid: size for pid in tree if (size := _rollup(pid)) is not None}
                processes = max(processes, len(tree))
                # Sizes read while processes are being forked belong to different moments and do not add up.
                if _tree(child.pid) == tree:
                    pss = max(pss, sum(size["Pss"] for size in sizes.values()) / 1024)
                for pid, size in sizes.items():
                    private = (size["Private_Clean"] + size["Private_Dirty"]) / 1024
                    own[pid] = max(own.get(pid, 0.0), private)
            try:
                status = child.wait(interval_s)
                break
            except subprocess.TimeoutExpired:
                continue
    return Usage(status, time.monotonic() - began, log.read_text(), processes, pss, own)


def _tree(root: int) -> list[int]:
    try:
        return [root, *(child.pid for child in psutil.Process(root).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def _rollup(pid: int) -> dict[str, int] | None:
    """KiB by kind; None when the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return None
    return {line.split(":")[0]: int(line.split()[1]) for line in lines}
