"""What one peer wrote to its neighbors and heard from them: each message by neighbor, round and kind, in bytes of ZMTP.

A message belongs to the round whose snapshot it is about, a beat to the round that it names; both ends can tell, so
that their ledgers can be compared. Round 0 is what belongs to none: beats before the first, and goodbyes.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from transport.messages import Ack, Beat, Credit, Decline, Leave, Message, Offer, Piece, Resend
from transport.transfers import Send

OFFERS_KNOWN = 512  # of one neighbor; what comes later about an older one counts for no round

Kinds = dict[str, list[int]]
"""Of each kind of message, how many there were, and how many bytes they took."""


@dataclass
class EdgeBook:
    """What this peer sent along one outgoing edge. Stream holds all it wrote to that neighbor, on either connection."""

    messages: int = 0
    payload: int = 0
    stream: int = 0
    retransmitted: int = 0


class Ledger:
    """Kept by a peer's loop, and by it alone until the loop has settled."""

    def __init__(self) -> None:
        self.books: defaultdict[int, EdgeBook] = defaultdict(EdgeBook)
        self._out: dict[tuple[int, int], Kinds] = {}
        self._in: dict[tuple[int, int], Kinds] = {}
        self._offered: dict[tuple[int, int], int] = {}
        self._heard_of: dict[tuple[int, int], int] = {}

    @property
    def stream(self) -> int:
        """All bytes written, but for handshakes."""
        return sum(book.stream for book in self.books.values())

    def sent(self, send: Send, size: int) -> None:
        """A message was handed to its socket; with its framing it has that size."""
        book = self.books[send.to]
        book.stream += size
        if send.again:
            book.retransmitted += len(send.body or b"")
        if isinstance(send.message, Offer):
            _know(self._offered, send.to, send.message)
        _count(self._out, send.to, send.message, size, self._heard_of if send.reply else self._offered)

    def heard(self, source: int, message: Message, size: int, last_round: int) -> None:
        """A message came; one about a round that its sender cannot be in counts for none."""
        if isinstance(message, Offer) and message.round <= last_round:
            _know(self._heard_of, source, message)
        answer = isinstance(message, Credit | Resend | Ack | Decline)
        if isinstance(message, Beat) and message.round > last_round:
            message = Leave()
        _count(self._in, source, message, size, self._offered if answer else self._heard_of)

    def acknowledged(self, receiver: int, payload: int) -> None:
        book = self.books[receiver]
        book.messages += 1
        book.payload += payload

    def lines(self) -> Iterator[tuple[str, dict[str, object]]]:
        """The journal's lines: one of the traffic with each neighbor in each round, and the books of all edges."""
        for neighbor, round in sorted(self._out.keys() | self._in.keys()):
            key = neighbor, round
            facts = {"neighbor": neighbor, "round": round, "out": self._out.get(key, {}), "in": self._in.get(key, {})}
            yield "traffic", facts
        yield "books", {"edges": [{"receiver": receiver} | vars(book) for receiver, book in sorted(self.books.items())]}


def _know(offers: dict[tuple[int, int], int], neighbor: int, offer: Offer) -> None:
    offers[neighbor, offer.sequence] = offer.round
    offers.pop((neighbor, offer.sequence - OFFERS_KNOWN), None)


def _count(
    kept: dict[tuple[int, int], Kinds],
    neighbor: int,
    message: Message,
    size: int,
    offers: dict[tuple[int, int], int],
) -> None:
    if isinstance(message, Piece | Credit | Resend | Ack | Decline):
        round = offers.get((neighbor, message.sequence), 0)
    else:
        round = message.round if isinstance(message, Beat | Offer) else 0
    count = kept.setdefault((neighbor, round), {}).setdefault(type(message).__name__.lower(), [0, 0])
    count[0] += 1
    count[1] += size
