"""What a peer's main thread asks of its sockets' thread: commands, in order, and a wake-up only if that thread sleeps.

To be woken costs more than most commands do.
"""

import contextlib
import queue
import socket
import time
from collections.abc import Callable

Command = Callable[[float], None]


class Commands:
    """Commands are given the time at which they are carried out."""

    def __init__(self) -> None:
        self._given: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._asleep = False

    # Called by the peer's main thread.

    def give(self, act: Command) -> None:
        """Have something done now."""
        self.leave(act)
        self.wake()

    def leave(self, act: Command) -> None:
        """Have something done before anything else, when the sockets' thread is next awake."""
        self._given.put(act)

    def wake(self) -> None:
        if self._asleep:
            self._asleep = False
            with contextlib.suppress(OSError):  # closed: the thread has ended, which whoever waits for it notices
                self._writer.send(b"!")

    # Called by the sockets' thread.

    def fileno(self) -> int:
        """Readable when there is a reason to wake up."""
        return self._reader.fileno()

    def may_sleep(self) -> bool:
        """Whether nothing is left to do; whatever is given from here on wakes the thread up."""
        self._asleep = True  # first, or a command given in between would go unnoticed
        return self._given.empty()

    def carry_out(self, woken: bool) -> bool:
        """Do what was asked for; False when it was nothing."""
        self._asleep = False
        if woken:
            self._reader.recv(4096)
        if self._given.empty():
            return False
        while not self._given.empty():
            self._given.get()(time.monotonic())
        return True

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
