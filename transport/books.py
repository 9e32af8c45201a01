"""The ledger: every byte of every connection as ZMTP frames it, and the kernel's word on it.

`payload` is what a method gets, `stream` everything in the TCP stream (handshake, framing, headers, heartbeats,
acknowledgements, repeats). On Linux the stream is compared with TCP_INFO, to the byte; where that cannot be
read the books say so.
"""

import os
import socket
import struct
import sys
from collections.abc import Iterable, Sized
from dataclasses import dataclass

# ZMTP 3.1. NULL mechanism: a 64-byte greeting, then one READY command that names the socket type and the
# routing id.
_GREETING = 64
_SOCKET_TYPE = 1 + len("Socket-Type") + 4
_IDENTITY = 1 + len("Identity") + 4
_READY = 1 + len("READY")

# CURVE: each side says two commands in place of READY, whose properties are encrypted; and what it encrypts it puts
# into a command of its own: 8 bytes of name, 8 of nonce, 16 of authentication, 1 of flags.
_HELLO, _WELCOME = 200, 168
_INITIATE = 9 + 96 + 8 + 16 + 128
_CURVE_READY = 6 + 8 + 16
_CURVE_FRAME = 8 + 8 + 16 + 1

# struct tcp_info of Linux 4.19 and later.
_BYTES_ACKED, _BYTES_RECEIVED, _BYTES_RETRANSMITTED, _TCP_INFO_SIZE = 120, 128, 208, 216


def frame_bytes(body: int) -> int:
    """Bytes on the wire of one ZMTP frame: a flag, a length of 1 or 8 bytes, the body."""
    return body + (2 if body <= 255 else 9)


def message_bytes(frames: Iterable[Sized], curve: bool = False) -> int:
    """Bytes on the wire of a message of several frames."""
    grown = _CURVE_FRAME if curve else 0
    return sum([frame_bytes(len(frame) + grown) for frame in frames])


def handshake_bytes(socket_type: str, routing_id: bytes, curve: bool = False) -> int:
    """Bytes that one side of a connection sends before its first message; the DEALER is the one that connects."""
    properties = _SOCKET_TYPE + len(socket_type) + _IDENTITY + len(routing_id)
    if not curve:
        return _GREETING + frame_bytes(_READY + properties)
    first, second = (_HELLO, _INITIATE) if socket_type == "DEALER" else (_WELCOME, _CURVE_READY)
    return _GREETING + frame_bytes(first) + frame_bytes(second + properties)


@dataclass(frozen=True)
class TcpCounters:
    """What the kernel counted on one connection. Out counts bytes the other side has acknowledged."""

    out: int
    into: int
    retransmitted: int


def tcp_counters(descriptor: int) -> TcpCounters | None:
    """Read TCP_INFO of libzmq's descriptor; None where there is none (not TCP, not Linux), OSError when closed."""
    if sys.platform != "linux":
        return None
    # A duplicate that stays open would hide the other side's closing from libzmq.
    with socket.socket(fileno=os.dup(descriptor)) as duplicate:
        if duplicate.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        info = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if len(info) < _TCP_INFO_SIZE:
        return None
    read = [struct.unpack_from("=Q", info, at)[0] for at in (_BYTES_ACKED, _BYTES_RECEIVED, _BYTES_RETRANSMITTED)]
    return TcpCounters(*read)


@dataclass
class Connection:
    """One connection to or from a neighbor, and the bytes that should have crossed it."""

    neighbor: int
    opened_here: bool
    descriptor: int
    stream_out: int
    stream_in: int
    routing_id: bytes = b""
    closed: bool = False
    kernel: TcpCounters | None = None

    def read_kernel(self) -> bool:
        """Compare with the kernel's counters; True when both agree to the byte or cannot be compared."""
        if not self.closed:
            try:
                self.kernel = tcp_counters(self.descriptor)
            except OSError:
                self.closed = True
        return self.closed or self.kernel is None or self.agrees

    @property
    def agrees(self) -> bool:
        # The side that connected counts its SYN as one acknowledged byte.
        syn = 1 if self.opened_here else 0
        kernel = self.kernel
        return kernel is not None and (kernel.out - syn, kernel.into) == (self.stream_out, self.stream_in)

    def facts(self) -> dict[str, object]:
        """The journal's line."""
        kernel = self.kernel
        if self.closed:
            verified, note = None, "closed before its counters could be read"
        elif kernel is None:
            verified, note = None, "no kernel counters for this transport"
        else:
            verified, note = self.agrees, ""
        return {
            "neighbor": self.neighbor,
            "direction": "out" if self.opened_here else "in",
            "stream_out": self.stream_out,
            "stream_in": self.stream_in,
            "kernel_out": None if kernel is None else kernel.out - (1 if self.opened_here else 0),
            "kernel_in": None if kernel is None else kernel.into,
            "kernel_retransmitted": None if kernel is None else kernel.retransmitted,
            "verified": verified,
            "note": note,
        }
