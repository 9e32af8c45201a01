"""The options every ZeroMQ socket of a peer is opened with, and why."""

import zmq

# Pieces up to this size are copied: sending in place costs a ZeroMQ context and three threads more.
COPIED_BYTES = 2**18
# Left to itself it grows to megabytes, which fall out of the processor's caches before they are read.
SEND_BUFFER = 512 * 1024

# pyzmq's flags are enumerations, whose arithmetic costs more than a call of libzmq.
READABLE, AT_ONCE, MORE = int(zmq.POLLIN), int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)
HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
HANDSHAKE_FAILED |= zmq.EVENT_HANDSHAKE_FAILED_AUTH
WATCHED = zmq.EVENT_CONNECTED | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, piece_bytes: int) -> zmq.Socket[bytes]:
    """A socket that takes pieces of that size, and no larger message."""
    opened = context.socket(kind)
    opened.copy_threshold = COPIED_BYTES
    opened.setsockopt(zmq.LINGER, 0)
    opened.setsockopt(zmq.SNDBUF, SEND_BUFFER)
    opened.setsockopt(zmq.SNDHWM, 256)
    opened.setsockopt(zmq.RCVHWM, 256)
    opened.setsockopt(zmq.IMMEDIATE, 1)
    opened.setsockopt(zmq.MAXMSGSIZE, piece_bytes + 4096)
    opened.setsockopt(zmq.HANDSHAKE_IVL, 5000)
    # A ZMTP heartbeat is answered by libzmq although Python hangs, and cuts a slow large frame: beats are our own.
    opened.setsockopt(zmq.HEARTBEAT_IVL, 0)
    opened.setsockopt(zmq.RECONNECT_IVL, 100)
    opened.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    opened.setsockopt(zmq.BACKLOG, 256)
    return opened
