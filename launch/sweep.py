"""Runs the cells of a sweep, each as a `swarm run` of its own, as many at once as asked for and as memory allows.

Stopped at any moment it leaves what the same command goes on from: finished cells stay, and no process outlives it.
"""

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import psutil
from rich.console import Console

from launch.grid import Cell, Checked, check, lay_out, read_variations, set_aside
from launch.processes import die_with
from launch.results import EXIT_STATUS
from launch.sweep_table import tabulate
from launch.units import count
from topology import TopologyError, load

RUN_MB = 400.0
"""What a run needs beside its peers: the supervisor and the fork server, libraries and data. Measured, rounded up."""
STOP_LIMIT_S = 30.0  # a run stops its peers within 4 s, and then writes its summary and its report
LOOK_AGAIN_S = 1.0  # a signal wakes the sweep at once; this is for one that another thread has taken

SEVERITY = (0, 3, 1)
"""Exit statuses, from good to bad."""

_SIGNALS = {signal.SIGCHLD, signal.SIGINT, signal.SIGTERM}

Tell = Callable[[Cell, int, str], None]
"""Called for each cell that has ended: its exit status, and what it said."""


@dataclass(frozen=True)
class _Running:
    checked: Checked
    process: "subprocess.Popen[bytes]"
    said: IO[bytes]


def sweep(file: Path, vary: Sequence[str], out: Path | None, at_once: int, console: Console) -> int:
    """Run what is not finished, and tell what it came to. The exit status; raises `TopologyError` before any run."""
    grid = read_variations(vary)
    folder = out or Path("runs") / f"{load(file).swarm.name}-sweep"
    cells = lay_out(file, grid, folder)
    if at_once > 1 and any(override.port for cell in cells for override in cell.load().peer):
        raise TopologyError("--at-once: the file gives a [[peer]] a port, which two cells cannot have at once")
    with _alone_in(folder):
        checked = check(cells)
        todo = [one for one in checked if not one.finished]
        say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
        say(f"{count(len(cells), 'cell')} in {folder}: {len(cells) - len(todo)} finished before, {len(todo)} to run")
        ended = 0

        def tell(cell: Cell, status: int, said: str) -> None:
            nonlocal ended
            ended += 1
            last = said.rpartition("\n")[0] if status in (0, 3) else f"exit status {status}\n{said}"
            say(f"{ended} of {len(todo)}  {cell.name}: {last}")

        if not run_cells(todo, at_once, tell):
            say("stopped; the same command goes on from here", style="red")
            return 1
        table = tabulate(cells)
        table.write(folder)
        console.print(table.table(), crop=False)
        for note in table.notes:
            say(note)
        say(f"{folder / 'sweep.csv'}\n{folder / 'sweep.png'}")
        return max((EXIT_STATUS[status] for status in table.statuses), key=SEVERITY.index)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold a folder against other sweeps, which would take a cell that is running for an interrupted one.

    One that was not there before and stays empty is removed again.
    """
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise TopologyError(f"--out: cannot write to {folder}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise TopologyError(f"--out: another sweep is going on in {folder}. Wait, or name another folder") from error
    try:
        yield
    finally:
        if is_new and not any(folder.iterdir()):
            folder.rmdir()
        os.close(descriptor)


def run_cells(todo: Sequence[Checked], at_once: int, tell: Tell) -> bool:
    """Run the cells in their order. False if Ctrl-C or SIGTERM ended it; every process has ended in any case."""
    waiting, running = deque(todo), list[_Running]()
    stop_by: float | None = None
    free_mb = 0.0
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        while running or (waiting and stop_by is None):
            if not running:
                free_mb = psutil.virtual_memory().available / 1e6
            while waiting and stop_by is None and len(running) < at_once:
                if not fits(waiting[0].memory_mb, [one.checked.memory_mb for one in running], free_mb):
                    break
                running.append(_start(waiting.popleft()))
            received = signal.sigtimedwait(_SIGNALS, LOOK_AGAIN_S)
            if received is not None and received.si_signo != signal.SIGCHLD:
                stop_by = stop_by or time.monotonic() + STOP_LIMIT_S
                for one in running:
                    one.process.send_signal(signal.SIGINT)
            if stop_by is not None and time.monotonic() > stop_by:
                for one in running:
                    one.process.kill()
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                tell(one.checked.cell, one.process.returncode, _read(one.said))
    finally:
        for one in running:
            one.process.kill()
            one.process.wait()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return stop_by is None


def fits(next_mb: float, running_mb: Sequence[float], free_mb: float) -> bool:
    """Whether one more run fits into what was free when none ran. One alone always may: it was checked."""
    return not running_mb or sum(RUN_MB + own_mb for own_mb in (next_mb, *running_mb)) <= free_mb


def _start(checked: Checked) -> _Running:
    cell = checked.cell
    set_aside(cell)
    options = [part for change in cell.changes for part in ("--set", change)]
    # -P: a folder of the user's that happens to be called launch is not ours.
    command = [sys.executable, "-P", "-m", "launch", "run", str(cell.file), "--quiet", "--out", str(cell.folder)]
    said = tempfile.TemporaryFile()  # noqa: SIM115  read, and closed, when the process has ended
    process = subprocess.Popen(
        [*command, *options],
        stdin=subprocess.DEVNULL,
        stdout=said,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C is for the sweep, which tells the cells once
        preexec_fn=partial(_begin, os.getpid()),
    )
    return _Running(checked, process, said)


def _begin(parent: int) -> None:
    """In the new process: hear signals again, and end with the sweep, whatever kills it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job is started deaf to it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    die_with(parent)


def _read(said: IO[bytes]) -> str:
    with said:
        said.seek(0)
        return said.read().decode(errors="replace").strip()
