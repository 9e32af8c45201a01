"""A peer's door to its neighbors: share a snapshot, gather theirs, and leave; every wait in it ends.

The main thread of a peer talks to its sockets' thread (`transport.loop`) only through this object.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from transport import control
from transport.layout import Bytes, Snapshot
from transport.loop import Loop
from transport.transfers import Delivery, Missing

T = TypeVar("T")

ROUNDS_IN_FLIGHT = 3
"""Snapshots a peer may have underway: two that travel and one only offered, so that it can follow at once. Along
undirected edges it never comes to more than two, for a neighbor is at most one round behind."""


class Stopped(Exception):
    """The supervisor ordered this peer to stop."""


class TransportError(RuntimeError):
    """The transport of this peer cannot go on."""


class Node:
    """Wraps a `Loop` that is not yet started."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._round = 0
        self.waits: list[tuple[float, float, int | None]] = []
        """From when to when the reader had nothing to do, and whose message ended it, if one did."""
        self._shared = 0
        self._early: dict[tuple[int, int], Delivery] = {}
        self._gathered: set[int] = set()

    def open(self, timeout_s: float) -> str:
        """Bind, and return where. Raises the error of the bind."""
        self._loop.start()
        try:
            endpoint = self._loop.endpoint.get(timeout=timeout_s)
        except queue.Empty as error:
            raise TransportError(f"not bound to {self._loop.bind} within {timeout_s:g} s") from error
        if isinstance(endpoint, BaseException):
            raise TransportError(f"cannot bind {self._loop.bind}: {endpoint}") from endpoint
        return endpoint

    def connect(self, endpoints: dict[int, str]) -> None:
        """Open the connections to the neighbors this peer sends to."""
        self._ask(lambda now: self._loop.connect(now, endpoints))

    def report(self, report: control.Report) -> None:
        self._loop.commands.give(lambda _: self._loop.report(report))

    def await_order(self, kind: type[T], timeout_s: float) -> T:
        """The supervisor's next order, which must be of this kind."""
        try:
            order = self._loop.orders.get(timeout=timeout_s)
        except queue.Empty as error:
            raise TransportError(f"no {kind.__name__} from the supervisor within {timeout_s:g} s") from error
        if order is None:
            raise TransportError("the transport thread ended") from self._loop.failure
        if isinstance(order, control.Stop):
            raise Stopped
        if not isinstance(order, kind):
            raise TransportError(f"the supervisor said {order}, expected {kind.__name__}")
        return order

    def enter(self, round: int) -> None:
        """Begin a round."""
        self.check()
        entered = time.monotonic()
        self._loop.commands.leave(lambda _: self._loop.enter(entered, round))
        self._round = round
        self._gathered.clear()
        for key in [key for key in self._early if key[1] < round]:
            self.release(self._early.pop(key).block)

    def share(self, snapshots: Mapping[int, Snapshot]) -> None:
        """Offer each neighbor its snapshot, and go on. Waits first while too many rounds are underway."""
        if snapshots:
            self._wait_until(lambda: len(self._loop.open_rounds) + self._pending < ROUNDS_IN_FLIGHT)
            self._shared += 1
            self._loop.commands.give(lambda now: self._loop.submit(now, snapshots))

    def gather(self, senders: Iterable[int]) -> Iterator[Delivery | Missing]:
        """This round's snapshots of these neighbors as they arrive; each ends in a `Delivery` or a `Missing`.

        The reader gives each delivered block back with `release` when it has read it; only then may another
        snapshot follow.
        """
        expected = frozenset(senders)
        if again := expected & self._gathered:
            raise ValueError(f"the snapshots of peers {sorted(again)} for round {self._round} were already gathered")
        self._gathered |= expected
        waiting = set(expected)
        self._loop.commands.give(lambda now: self._loop.protocol.expect(now, expected))
        while waiting:
            item = self._next_of(waiting)
            waiting.discard(item.sender)
            if isinstance(item, Delivery):
                item.taken = time.monotonic()
                self._loop.record("delivered", item.facts())
            yield item

    def _next_of(self, waiting: set[int]) -> Delivery | Missing:
        """The next that is awaited in this round; what belongs to the next round is kept, what is left over let go."""
        for sender in sorted(waiting):
            if (sender, self._round) in self._early:
                return self._early.pop((sender, self._round))
        while True:
            began = time.monotonic()
            item = self._next()
            self.waits.append((began, time.monotonic(), None if item is None else item.sender))
            self.check()
            if item is None:
                continue
            if item.round == self._round and item.sender in waiting:
                return item
            if isinstance(item, Delivery):
                if item.round > self._round:
                    self._early[item.sender, item.round] = item
                else:
                    self.release(item.block)

    def _next(self) -> Delivery | Missing | None:
        # The protocol resolves whatever is awaited by its deadline; only the end of its thread could leave it
        # open.
        while True:
            try:
                return self._loop.inbox.get(timeout=1.0)
            except queue.Empty:
                if not self._loop.is_alive():
                    raise TransportError("the transport thread ended") from self._loop.failure

    def release(self, block: Bytes) -> None:
        """Give a delivered block back."""
        self._loop.commands.leave(lambda _: self._loop.protocol.release(block))
        if self._loop.blocks_wanted:  # looked at last, or an offer that comes just now would have to wait
            self._loop.commands.wake()

    def drain(self) -> None:
        """Wait until every snapshot offered is taken, declined or given up."""
        self._wait_until(lambda: not self._loop.open_rounds and not self._pending)

    def settle(self, timeout_s: float) -> None:
        """Say goodbye and have every connection compared with the kernel; writes the books to the journal."""
        settled = threading.Event()
        self._loop.commands.give(lambda now: self._loop.settle(now, settled.set))
        if not settled.wait(timeout_s):
            raise TransportError(f"the books could not be closed within {timeout_s:g} s")

    def close(self, timeout_s: float) -> None:
        """Close every socket and end the thread."""
        self._loop.commands.give(self._loop.close)
        self._loop.join(timeout_s)
        if self._loop.is_alive():
            raise TransportError(f"the transport thread did not end within {timeout_s:g} s")

    def check(self) -> None:
        """Raises `Stopped` when the supervisor ordered so, `TransportError` when the sockets' thread has died."""
        if self._loop.failure is not None:
            raise TransportError("the transport thread failed") from self._loop.failure
        if self._loop.stop_ordered.is_set():
            raise Stopped

    def _ask(self, act: Callable[[float], None]) -> None:
        """Have something done in the loop's thread, and wait until it is."""
        answer: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def run(now: float) -> None:
            try:
                act(now)
                self._loop.dispatch()
            except Exception as error:
                answer.put(error)
            else:
                answer.put(None)

        self._loop.commands.give(run)
        while True:
            try:
                error = answer.get(timeout=1.0)
                break
            except queue.Empty:
                if not self._loop.is_alive():
                    raise TransportError("the transport thread ended") from self._loop.failure
        if error is not None:
            raise error

    @property
    def _pending(self) -> int:
        """Snapshots shared that the loop has yet to see."""
        return self._shared - self._loop.submitted

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        # The protocol ends every transfer, by delivery or by its deadline, so this ends too.
        with self._loop.open_rounds_changed:
            while not condition():
                self.check()
                self._loop.open_rounds_changed.wait(1.0)
