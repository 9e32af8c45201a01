"""The fork server starts, reports and ends processes, and none outlives it. Each case runs in a process of its own."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

PRELUDE = """
import os, select, signal, sys, time
from launch.processes import Exited, ForkServer, Started

def events(server, wanted):
    found, end = [], time.monotonic() + 30
    while len(found) < wanted:
        assert time.monotonic() < end, f"only {found}"
        select.select([server], [], [], 1.0)
        found += server.events()
    return found
"""


def run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(script)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(*pids: int) -> None:
    end = time.monotonic() + 20
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < end, f"still there: {[pid for pid in pids if alive(pid)]}"
        time.sleep(0.02)


def test_ends_are_reported_with_their_status() -> None:
    run(
        """
        def life(peer, incarnation):
            if peer == 2: os.kill(os.getpid(), signal.SIGKILL)
            if peer == 3: raise ValueError("peer 3 cannot")
            return 10 * incarnation + peer
        server = ForkServer(life)
        for peer in range(4):
            server.start(peer, incarnation=4)
        found = events(server, 8)
        assert {event.peer for event in found if isinstance(event, Started)} == {0, 1, 2, 3}
        ends = {event.peer: event.status for event in found if isinstance(event, Exited)}
        assert ends == {0: 40, 1: 41, 2: -signal.SIGKILL, 3: 1}, ends
        server.close()
        """
    )


def test_a_peer_can_be_killed_and_started_again() -> None:
    run(
        """
        def life(peer, incarnation):
            if incarnation == 0: time.sleep(600)
            return 7
        server = ForkServer(life)
        server.start(5)
        events(server, 1)
        server.kill(5)
        assert events(server, 1)[0].status == -signal.SIGKILL
        server.kill(5)  # not there any more: nothing happens
        server.start(5, incarnation=1)
        assert events(server, 2)[1].status == 7
        server.close()
        """
    )


def test_closing_ends_every_peer() -> None:
    pids = run(
        """
        server = ForkServer(lambda peer, incarnation: time.sleep(600))
        for peer in range(3):
            server.start(peer)
        print(server.pid, *[event.pid for event in events(server, 3)])
        server.close()
        """
    )
    wait_until_gone(*map(int, pids.split()))


def test_nothing_outlives_a_killed_supervisor() -> None:
    script = PRELUDE + textwrap.dedent(
        """
        server = ForkServer(lambda peer, incarnation: time.sleep(600))
        for peer in range(3):
            server.start(peer)
        print(server.pid, *[event.pid for event in events(server, 3)], flush=True)
        time.sleep(600)
        """
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        pids = [int(pid) for pid in supervisor.stdout.readline().split()]
        assert len(pids) == 4 and all(alive(pid) for pid in pids)
        # Even a peer that is stopped, and so could not act on anything, must go.
        os.kill(pids[1], signal.SIGSTOP)
        supervisor.kill()
    wait_until_gone(*pids)


def test_a_process_with_threads_is_not_forked() -> None:
    run(
        """
        import threading
        release = threading.Event()
        threading.Thread(target=release.wait).start()
        try:
            ForkServer(lambda peer, incarnation: 0)
        except RuntimeError as error:
            assert "before any thread" in str(error)
        else:
            raise AssertionError("it forked")
        finally:
            release.set()
        """
    )
