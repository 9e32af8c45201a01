"""Ends a connection that libzmq accepted, which its own interface cannot do: through the descriptor it has for it."""

import contextlib
import os
import socket
from collections.abc import Iterable


def cut(descriptors: Iterable[int]) -> None:
    """Both ends see the connections end; libzmq then closes the descriptors itself, and who connected comes again.

    A name that was taken by another is free then: libzmq gives it to the first connection that claims it, and leaves
    the second one open, but unheard.
    """
    for descriptor in descriptors:
        # It may have ended meanwhile.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)
