"""What waits for a socket that takes no more now, in order, for each neighbor and each of its two sockets."""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping

from transport.liveness import Neighbor
from transport.messages import Beat
from transport.transfers import Send

LIMIT = 256  # messages kept for one socket; the protocol asks again for what is dropped


class Backlog:
    """`transmit` hands a message to its socket, and says False when that cannot take it now."""

    def __init__(self, neighbors: Mapping[int, Neighbor], transmit: Callable[[Send], bool]) -> None:
        self._neighbors, self._transmit = neighbors, transmit
        self._waiting: defaultdict[tuple[int, bool], deque[Send]] = defaultdict(deque)

    def __bool__(self) -> bool:
        return any(self._waiting.values())

    def send(self, send: Send) -> None:
        """Transmit a message now, or after those that wait already."""
        waiting = self._waiting[send.to, send.reply]
        if not waiting and self._transmit(send):
            return
        if self._neighbors[send.to].gone:
            waiting.clear()
        elif len(waiting) < LIMIT and not (isinstance(send.message, Beat) and waiting):
            waiting.append(send)

    def flush(self) -> None:
        """Transmit what its socket takes by now."""
        for (neighbor, _), waiting in self._waiting.items():
            if self._neighbors[neighbor].gone:
                waiting.clear()
            while waiting and self._transmit(waiting[0]):
                waiting.popleft()
