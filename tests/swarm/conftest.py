"""Whole swarms of real processes: every run is the real command, in a session of its own, and may leave nothing."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import tomli_w

SWARM = Path(sys.executable).with_name("swarm")
MARK = "SWARM_TEST_RUN"
PYTHONPATH = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])  # for breaking.py
GRACE_S = 10.0  # for the kernel to end and reap what it was told to kill, on a busy machine

SMALL: dict[str, dict[str, Any]] = {
    "swarm": {"name": "small", "peers": 4, "rounds": 2, "seed": 1, "round_deadline_s": 60.0},
    "data": {"alpha": 1.0},
    "models": {"pool": [{"name": "mlp", "hidden": [32]}]},
    "training": {"optimizer": "adam", "learning_rate": 0.002, "batch_size": 32},
}


def small(**sections: Any) -> dict[str, Any]:
    """A swarm that runs in a second, with the given keys of each section changed."""
    changed = {
        name: SMALL.get(name, {}) | value if isinstance(value, dict) else value for name, value in sections.items()
    }
    return SMALL | changed


class Running:
    """A run or sweep. Its processes carry a mark in their environment, which neither fork nor exec takes off."""

    def __init__(
        self,
        work: Path,
        out: Path,
        topology: dict[str, Any],
        arguments: tuple[str, ...],
        environment: dict[str, str],
        verb: str,
    ) -> None:
        self.folder = out
        self.file = work / "topology.toml"
        self.file.write_text(tomli_w.dumps(topology))
        self.peers = range(topology["swarm"]["peers"])
        # Short, for the paths of sockets may have 107 bytes; of this run alone, so that it can be found empty.
        self.temporary = Path(tempfile.mkdtemp(prefix="st-", dir="/tmp"))
        self._mark = f"{MARK}={secrets.token_hex(16)}"
        self._said = work / "output.txt"
        name, mark = self._mark.split("=")
        with self._said.open("wb") as output:
            self.process = subprocess.Popen(
                [SWARM, verb, self.file, "--out", self.folder, *arguments],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=work, start_new_session=True,
                env=os.environ | {"TMPDIR": str(self.temporary), "PYTHONPATH": PYTHONPATH, name: mark} | environment,
            )  # fmt: skip

    @property
    def output(self) -> str:
        return self._said.read_text(errors="replace")

    def journal(self, peer: int) -> list[dict[str, Any]]:
        """What a peer has written so far; a line that is being written is left out."""
        path = self.folder / "peers" / str(peer) / "events.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [json.loads(line) | {"peer": peer} for line in lines]

    def events(self, kind: str, peer: int | None = None) -> list[dict[str, Any]]:
        peers = self.peers if peer is None else [peer]
        return [event for peer in peers for event in self.journal(peer) if event["event"] == kind]

    def pid(self, peer: int) -> int:
        return int(self.events("started", peer)[-1]["pid"])

    def processes(self) -> set[int]:
        """Every process of this run that there is now."""
        found = set()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.add(int(folder.name))
            except OSError:  # it has ended, or is not ours
                continue
        return found

    def wait_for(self, condition: Callable[[], Any], limit_s: float = 60.0) -> Any:
        """Poll until a condition holds, and return it; the run must still be going by then."""
        end = time.monotonic() + limit_s
        while not (found := condition()):
            assert self.process.poll() is None, f"ended with {self.process.returncode} too early:\n{self.output}"
            assert time.monotonic() < end, f"not within {limit_s:g} s:\n{self.output}"
            time.sleep(0.002)
        return found

    def end(self, limit_s: float = 90.0) -> "Ended":
        """Wait for the command's end; no process and no socket of it may be there any more."""
        try:
            status = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {limit_s:g} s:\n{self.output}")
        left = self.processes()
        assert not left, f"left behind: {left}\n{self.output}"
        assert list(self.temporary.iterdir()) == []
        return Ended(self, status)

    def vanish(self, limit_s: float = GRACE_S) -> None:
        """Wait until there is no process left, without waiting for the command to end by itself."""
        end = time.monotonic() + limit_s
        while left := self.processes() - {self.process.pid}:
            assert time.monotonic() < end, f"still there after {limit_s:g} s: {left}\n{self.output}"
            time.sleep(0.01)

    def clear(self) -> set[int]:
        """Kill whatever is left, and say what that was."""
        left = self.processes()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait(GRACE_S)
        shutil.rmtree(self.temporary, ignore_errors=True)
        return left


class Ended:
    """A run that has ended, and what it left."""

    def __init__(self, running: Running, status: int) -> None:
        self.status, self.output, self.folder, self.file = status, running.output, running.folder, running.file
        self._running = running

    @cached_property
    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "summary.json").read_text()))

    @cached_property
    def _journals(self) -> list[list[dict[str, Any]]]:
        return [self._running.journal(peer) for peer in self._running.peers]

    def events(self, kind: str, peer: int | None = None) -> list[dict[str, Any]]:
        """All events of one kind, in peer order."""
        journals = self._journals if peer is None else [self._journals[peer]]
        return [event for journal in journals for event in journal if event["event"] == kind]

    def snapshots(self) -> dict[tuple[int, int], str]:
        """The digest of every peer's weights after every round."""
        return {(event["peer"], event["round"]): event["snapshot"] for event in self.events("round")}


@pytest.fixture(scope="session")
def _runs() -> Iterator[list[Running]]:
    runs: list[Running] = []
    yield runs
    for running in runs:
        running.clear()


@pytest.fixture(autouse=True)
def _nothing_is_left(_runs: list[Running]) -> Iterator[None]:
    yield
    left = {pid for running in _runs for pid in running.clear()}
    _runs.clear()
    assert not left, f"processes left behind: {left}"


@pytest.fixture(scope="session")
def start(_runs: list[Running], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Running]:
    """Start a swarm; what a test leaves running is killed after it, and fails it."""

    def start(
        *arguments: str,
        out: Path | None = None,
        environment: dict[str, str] | None = None,
        files: dict[str, str] | None = None,
        verb: str = "run",
        **sections: Any,
    ) -> Running:
        work = tmp_path_factory.mktemp("swarm")
        for name, text in (files or {}).items():
            (work / name).write_text(text)
        running = Running(work, out or work / "run", small(**sections), arguments, environment or {}, verb)
        _runs.append(running)
        return running

    return start


@pytest.fixture(scope="session")
def run(start: Callable[..., Running]) -> Callable[..., Ended]:
    """Run a swarm to its end."""
    return lambda *arguments, **sections: start(*arguments, **sections).end()


@pytest.fixture(scope="session")
def reference(run: Callable[..., Ended]) -> Ended:
    """An undisturbed CRAD run of four peers of two architectures."""
    return run(
        swarm={"rounds": 8},
        models={"pool": [{"name": "mlp", "hidden": [32]}, {"name": "cnn3", "width": 4}]},
    )


@pytest.fixture(scope="session")
def command() -> Iterator[Callable[..., tuple[Any, str, list[str]]]]:
    """A command in a process that may start no other: its status, its output, and what it tried to start."""
    script = Path(__file__).with_name("commands.py")
    with subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdin and process.stdout
        given, said = process.stdin, process.stdout

        def command(*arguments: Any, cwd: Path) -> tuple[Any, str, list[str]]:
            given.write(json.dumps({"arguments": [str(one) for one in arguments], "cwd": str(cwd)}) + "\n")
            answer = said.readline()
            assert answer, f"swarm {arguments} ended or took too long"
            return tuple(json.loads(answer))

        yield command


@pytest.fixture(scope="session")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """One real command that is no run."""
    cwd = tmp_path_factory.mktemp("cwd")

    def swarm(*arguments: Any) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([SWARM, *arguments], text=True, capture_output=True, cwd=cwd, timeout=60, check=False)

    return swarm
