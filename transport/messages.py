"""What peers say to each other: typed MessagePack headers, decoded strictly or refused with `BadMessage`.

A message is one header frame, and for a `Piece` one frame of raw bytes after it. The header is an array, unknown or
missing fields are refused, and its size is checked before it is decoded, so that a stranger's bytes cost nothing.
"""

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

PROTOCOL_VERSION = 1
MAX_HEADER_BYTES = 1024

Count = Annotated[int, Meta(ge=0, lt=2**48)]
Hash = Annotated[int, Meta(ge=0)]  # MessagePack holds 64 bits at most
Seconds = Annotated[float, Meta(ge=0, lt=2**40)]
"""A reading of the sender's monotonic clock. All processes of one host share that clock."""
Reason = Annotated[str, Meta(max_length=200)]


class Beat(Struct, array_like=True, forbid_unknown_fields=True, tag=1):
    """I am alive: the round I am in, and the lowest round for which I may still offer you a snapshot."""

    round: Count
    offers_from: Count
    seconds_in_round: Seconds


class Offer(Struct, array_like=True, forbid_unknown_fields=True, tag=2):
    """I have a snapshot of this layout and size for you. Said again, it asks how far you are with the `sent` pieces."""

    sequence: Count
    round: Count
    layout: Hash
    bytes: Count
    pieces: Count
    digest: Hash
    submitted: Seconds
    sent: Count


class Credit(Struct, array_like=True, forbid_unknown_fields=True, tag=3):
    """You may send the pieces with an index below `limit`; 0 means: noted, wait."""

    sequence: Count
    limit: Count


class Piece(Struct, array_like=True, forbid_unknown_fields=True, tag=4):
    """One piece of a snapshot; its bytes are the frame that follows."""

    sequence: Count
    index: Count
    checksum: Hash
    sent: Seconds


class Resend(Struct, array_like=True, forbid_unknown_fields=True, tag=5):
    """These pieces did not arrive, or arrived damaged."""

    sequence: Count
    indices: Annotated[list[Count], Meta(max_length=64)]


class Ack(Struct, array_like=True, forbid_unknown_fields=True, tag=6):
    """The whole snapshot is here, verified and handed over."""

    sequence: Count


class Decline(Struct, array_like=True, forbid_unknown_fields=True, tag=7):
    """I will not take this snapshot."""

    sequence: Count
    reason: Reason


class Leave(Struct, array_like=True, forbid_unknown_fields=True, tag=8):
    """I am done and will say nothing more."""


Message = Beat | Offer | Credit | Piece | Resend | Ack | Decline | Leave


class Envelope(Struct, array_like=True, forbid_unknown_fields=True):
    """The header frame: who speaks, in which life, in which run."""

    version: int
    run: Annotated[bytes, Meta(min_length=16, max_length=16)]
    source: Count
    incarnation: Count
    message: Message


@dataclass(frozen=True)
class Identity:
    """Which peer this is, in which of its lives, in which run."""

    peer: int
    incarnation: int
    run: bytes

    def routing_id(self) -> bytes:
        return f"{self.peer}.{self.incarnation}".encode()


class BadMessage(ValueError):
    """Bytes from the network that are not a message of ours; the text says why."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode(envelope: Envelope) -> bytes:
    """The header frame of a message."""
    return _encoder.encode(envelope)


def decode(frame: bytes | memoryview) -> Envelope:
    """Read a header frame. Raises `BadMessage` for anything that is not exactly one of our messages."""
    if len(frame) > MAX_HEADER_BYTES:
        raise BadMessage(f"header of {len(frame)} bytes, at most {MAX_HEADER_BYTES} are allowed")
    try:
        envelope = _decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError) as error:
        raise BadMessage(f"not a message of this protocol: {error}") from error
    if envelope.version != PROTOCOL_VERSION:
        raise BadMessage(f"protocol version {envelope.version}, this peer speaks {PROTOCOL_VERSION}")
    return envelope
