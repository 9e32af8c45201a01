"""Starts peer processes from one preloaded fork server, and lets none outlive the supervisor, whatever kills it.

The supervisor forks the server from itself once everything is imported, the data loaded and the plan made, and
before it has a ZeroMQ context, a thread or a CUDA context. Each peer is a fork of that server, so it starts in
milliseconds and shares its memory. The kernel kills the server when the supervisor dies, and each peer when the
server dies.
"""

import contextlib
import ctypes
import gc
import json
import os
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_PR_SET_PDEATHSIG = 1

Life = Callable[[int, int], int]
"""What a peer process does: from (peer, incarnation) to an exit status."""


@dataclass(frozen=True)
class Started:
    peer: int
    pid: int


@dataclass(frozen=True)
class Exited:
    """A process ended. `status` is its exit status, or minus the signal that killed it."""

    peer: int
    pid: int
    status: int


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was asked
        os._exit(1)


class ForkServer:
    """The supervisor's end. Peers are asked for with `start`; what happens to them is read with `events`."""

    def __init__(self, life: Life) -> None:
        if threading.active_count() > 1:
            raise RuntimeError("the fork server must be forked before any thread is started")
        supervisor = os.getpid()
        self._channel, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        # Collections write into every object they visit; frozen ones stay on the pages that all processes share.
        gc.collect()
        gc.freeze()
        self.pid = os.fork()
        if self.pid == 0:
            self._channel.close()
            os.setsid()  # Ctrl-C is for the supervisor, which tells the peers
            die_with(supervisor)
            try:
                _serve(theirs, life)
            finally:
                os._exit(0)
        theirs.close()
        self._channel.setblocking(False)
        self._partial = b""

    def fileno(self) -> int:
        return self._channel.fileno()

    def start(self, peer: int, incarnation: int = 0) -> None:
        self._tell({"start": peer, "incarnation": incarnation})

    def kill(self, peer: int) -> None:
        """Send SIGKILL to a peer that is still there."""
        self._tell({"kill": peer})

    def _tell(self, order: dict[str, int]) -> None:
        self._channel.setblocking(True)
        with contextlib.suppress(BrokenPipeError):  # it died, which `events` tells
            self._channel.sendall(json.dumps(order).encode() + b"\n")
        self._channel.setblocking(False)

    def events(self) -> list[Started | Exited]:
        """What has happened since the last call. Raises ConnectionError when the server itself has died."""
        try:
            while data := self._channel.recv(65536):
                self._partial += data
            raise ConnectionError("the fork server died")
        except BlockingIOError:
            pass
        except ConnectionResetError as error:
            raise ConnectionError("the fork server died") from error
        *lines, self._partial = self._partial.split(b"\n")
        return [_read(json.loads(line)) for line in lines]

    def close(self) -> None:
        """End the server; peers that are still there are killed with it."""
        self._channel.close()
        os.waitpid(self.pid, 0)


def _read(line: dict[str, int]) -> Started | Exited:
    return Exited(**line) if "status" in line else Started(**line)


def _serve(channel: socket.socket, life: Life) -> None:
    """The server: fork on demand, report every end, until the supervisor closes the channel."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    children: dict[int, int] = {}
    wake_reader, wake_writer = socket.socketpair()
    for end in (wake_reader, wake_writer):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_writer.fileno())
    selector = selectors.DefaultSelector()
    selector.register(channel, selectors.EVENT_READ)
    selector.register(wake_reader, selectors.EVENT_READ)
    partial = b""

    def tell(line: dict[str, Any]) -> None:
        channel.sendall(json.dumps(line).encode() + b"\n")

    while True:
        ready = {key.fileobj for key, _ in selector.select()}
        if wake_reader in ready:
            wake_reader.recv(4096)
            for pid, status in _ended():
                tell({"peer": children.pop(pid), "pid": pid, "status": status})
        if channel in ready:
            data = channel.recv(65536)
            if not data:
                for pid in children:
                    os.kill(pid, signal.SIGKILL)
                return
            *lines, partial = (partial + data).split(b"\n")
            for order in map(json.loads, lines):
                if "start" in order:
                    descriptors = (channel, wake_reader, wake_writer, selector)
                    pid = _fork_peer(descriptors, life, order["start"], order["incarnation"])
                    children[pid] = order["start"]
                    tell({"peer": order["start"], "pid": pid})
                else:
                    for pid in [pid for pid, peer in children.items() if peer == order["kill"]]:
                        os.kill(pid, signal.SIGKILL)


def _ended() -> list[tuple[int, int]]:
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, os.waitstatus_to_exitcode(status)))


def _fork_peer(inherited: tuple[Any, ...], life: Life, peer: int, incarnation: int) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        die_with(server)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in inherited:
            descriptor.close()
        status = life(peer, incarnation)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
