"""What is looked at before a message is let in: that it is one of ours, of this run, and from whom it says."""

from collections.abc import Container

import zmq

from transport.messages import BadMessage, Envelope, Identity, Piece, decode


def open_message(frames: list[zmq.Frame], run: bytes, neighbors: Container[int]) -> tuple[Envelope, memoryview | None]:
    """The header and the body of a message of this run from a neighbor. Raises `BadMessage`."""
    if not 1 <= len(frames) <= 2:
        raise BadMessage(f"{len(frames)} frames, 1 or 2 are allowed")
    envelope = decode(frames[0].buffer)
    if envelope.run != run:
        raise BadMessage(f"run {envelope.run.hex()} is not this run")
    if envelope.source not in neighbors:
        raise BadMessage(f"peer {envelope.source} is no neighbor")
    if (len(frames) == 2) != isinstance(envelope.message, Piece):
        raise BadMessage("a body belongs to a piece, and to nothing else")
    return envelope, frames[1].buffer if len(frames) == 2 else None


def check_sender(envelope: Envelope, routing_id: bytes, dealer_of: int | None) -> None:
    """Whether the sender says the same in the message and of its connection. Raises `BadMessage`."""
    expected = Identity(envelope.source, envelope.incarnation, envelope.run).routing_id()
    if dealer_of is None and routing_id != expected:
        raise BadMessage(f"says it is {expected.decode()}")
    if dealer_of is not None and envelope.source != dealer_of:
        raise BadMessage(f"peer {dealer_of} speaks as peer {envelope.source}")


class Impersonation(BadMessage):
    """A member speaks in another's name."""

    def __init__(self, owner: str, claimed: int) -> None:
        super().__init__(f"the key of peer {owner} speaks as peer {claimed}")
        self.claimed = claimed


def check_key(envelope: Envelope, frame: zmq.Frame) -> None:
    """Whether the key of the connection is the one of the peer that the message names. Raises `Impersonation`."""
    owner = frame.get("User-Id")
    if owner != str(envelope.source):
        raise Impersonation(str(owner), envelope.source)
