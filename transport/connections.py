"""Every connection to or from a neighbor and the bytes that crossed it, known by libzmq's descriptor while it is open.

The socket monitors say when a descriptor opens and closes; a message says on which descriptor it came. Who is at the
other end of a connection opened there is unknown until its first message.
"""

import os
import socket

from transport.books import Connection, handshake_bytes

SO_MAX_PACING_RATE = 47  # <asm-generic/socket.h>; the socket module has no name for it


class Connections:
    """The connections of one node, which calls itself `routing_id`; encrypted, if `curve`."""

    def __init__(self, routing_id: bytes, curve: bool = False) -> None:
        self._routing_id, self._curve = routing_id, curve
        self._open: dict[int, Connection] = {}
        self._strangers: dict[int, int] = {}  # bytes received so far from who has not said who it is
        self.all: list[Connection] = []
        self.outward: dict[int, Connection] = {}
        self.inward: dict[int, Connection] = {}

    def connected(self, neighbor: int, descriptor: int) -> None:
        """A connection that this node opened."""
        out = handshake_bytes("DEALER", self._routing_id, self._curve)
        into = handshake_bytes("ROUTER", b"", self._curve)
        connection = Connection(neighbor, True, descriptor, out, into)
        self._add(connection)
        self.outward[neighbor] = connection

    def accepted(self, descriptor: int) -> None:
        """A connection that somebody opened to this node."""
        self._strangers[descriptor] = 0

    def knows(self, descriptor: int) -> bool:
        return descriptor in self._open or descriptor in self._strangers

    def received(self, descriptor: int, size: int) -> None:
        """A message came, or something that is none."""
        if descriptor in self._open:
            self._open[descriptor].stream_in += size
        elif descriptor in self._strangers:
            self._strangers[descriptor] += size

    def identify(self, descriptor: int, neighbor: int, routing_id: bytes) -> None:
        """A message from a connection opened there says that it is this neighbor's."""
        before = self._strangers.pop(descriptor, None)
        if before is not None:
            out = handshake_bytes("ROUTER", b"", self._curve)
            into = handshake_bytes("DEALER", routing_id, self._curve)
            connection = Connection(neighbor, False, descriptor, out, into + before, routing_id)
            self._add(connection)
            self.inward[neighbor] = connection

    def of(self, neighbor: int) -> list[int]:
        """The connections that this neighbor opened, or may have: some have not said whose they are."""
        theirs = [one.descriptor for one in self._open.values() if one.neighbor == neighbor and not one.opened_here]
        return [*theirs, *self._strangers]

    def pace(self, neighbor: int, bytes_per_s: int | None) -> None:
        """Have the kernel send to a neighbor at no more than a rate, if there is one and a connection is open."""
        connection = self.outward.get(neighbor)
        if bytes_per_s is not None and connection is not None and not connection.closed:
            with socket.socket(fileno=os.dup(connection.descriptor)) as paced:
                paced.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, bytes_per_s)

    def closed(self, descriptor: int) -> Connection | None:
        """A connection ended; None when it never said whose it was."""
        self._strangers.pop(descriptor, None)
        connection = self._open.pop(descriptor, None)
        if connection is not None:
            connection.closed = True
        return connection

    def _add(self, connection: Connection) -> None:
        self._open[connection.descriptor] = connection
        self.all.append(connection)
