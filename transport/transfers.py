"""What a protocol puts out, and the two ends of one snapshot's journey along one edge, as plain records."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from transport.layout import Bytes, Layout, Snapshot
from transport.messages import Message, Offer


@dataclass(frozen=True)
class Send:
    """A message to put on the wire. A reply goes back on the connection that the neighbor opened.

    Again: a piece that was sent before.
    """

    to: int
    message: Message
    body: memoryview | None = None
    reply: bool = False
    again: bool = False


@dataclass(frozen=True)
class Event:
    """Something worth a line in the journal."""

    name: str
    facts: dict[str, Any]


@dataclass
class Outgoing:
    """A snapshot on its way to a neighbor, seen from the sender."""

    sequence: int
    to: int
    round: int
    snapshot: Snapshot
    submitted: float
    since: float
    """When the deadline began to run: at the latest when the neighbor entered the round."""
    probe_at: float
    pause: float
    limit: int = 0
    sent: int = 0
    attempts: int = 0
    probed_at: float | None = None
    resent_bytes: int = 0

    def offer(self) -> Offer:
        layout = self.snapshot.layout
        return Offer(
            self.sequence,
            self.round,
            layout.hash,
            layout.bytes,
            len(self.snapshot.checksums),
            self.snapshot.digest,
            self.submitted,
            self.sent,
        )


@dataclass
class Incoming:
    """A snapshot on its way from a neighbor, seen from the receiver; without a block it is only an offer."""

    sender: int
    offer: Offer
    layout: Layout
    block: Bytes | None = None
    limit: int = 0
    received: int = 0
    repeats: int = 0
    first_sent: float = float("inf")
    checksums: list[int | None] = field(default_factory=list)

    def accept(self, block: Bytes, window: int) -> None:
        self.block = block
        self.checksums = [None] * self.offer.pieces
        self.limit = self.reach(window)

    def reach(self, window: int) -> int:
        """How far the sender may go: a window beyond what is here."""
        return min(self.received + window, self.offer.pieces)

    def lost(self, sent: int) -> list[int]:
        """Of the pieces sent so far, those that are not here."""
        return [index for index in range(min(sent, self.limit)) if self.checksums[index] is None]


@dataclass
class Delivery:
    """A complete, verified snapshot of a neighbor. The block is the reader's until it is given back.

    The five times are consecutive: submitted, first piece handed to the socket, last piece received, verified, taken.
    """

    sender: int
    round: int
    layout: Layout
    block: Bytes
    digest: int
    pieces: int
    repeats: int
    submitted: float
    first_sent: float
    last_received: float
    verified: float = 0.0
    taken: float = 0.0
    injected: float = 0.0
    """How long the piece that completed it was held back on purpose."""

    def buffers(self) -> dict[str, np.ndarray]:
        """The named buffers, as views into the block."""
        return self.layout.unpack(self.block)

    def facts(self) -> dict[str, object]:
        """The journal's line: bytes, and the five times, which add up to the observed one."""
        milliseconds = {
            "queue_ms": self.first_sent - self.submitted,
            "wire_ms": self.last_received - self.first_sent - self.injected,
            "verify_ms": self.verified - self.last_received,
            "injected_ms": self.injected,
            "inbox_ms": self.taken - self.verified,
            "observed_ms": self.taken - self.submitted,
        }
        return {
            "round": self.round,
            "sender": self.sender,
            "payload": self.layout.bytes,
            "pieces": self.pieces,
            "repeats": self.repeats,
            "digest": f"{self.digest:016x}",
        } | {name: round(seconds * 1e3, 4) for name, seconds in milliseconds.items()}


@dataclass(frozen=True)
class Missing:
    """A snapshot that was expected in this round and will not come."""

    sender: int
    round: int
    reason: str


Output = Send | Delivery | Missing | Event


class Outbox:
    """What a protocol wants done, in order, until its driver takes it."""

    def __init__(self) -> None:
        self._outputs: list[Output] = []

    def put(self, output: Output) -> None:
        self._outputs.append(output)

    def reply(self, to: int, message: Message) -> None:
        self.put(Send(to, message, reply=True))

    def note(self, name: str, **facts: object) -> None:
        self.put(Event(name, facts))

    def take(self) -> list[Output]:
        outputs, self._outputs = self._outputs, []
        return outputs
