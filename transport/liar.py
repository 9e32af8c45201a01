"""What a peer says on the wire that a correct one never says: another shape, another snapshot for everybody, old words
again, too many words.

It stands in the place of the protocol, so what it says goes through the real loop and is in the books. A lie is
written down before it is told.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, get_args

import msgspec
import numpy as np

from topology.faults import Byzantine, Told
from topology.reach import in_rounds
from topology.sections import TransportSection
from transport.faultlog import FaultLog
from transport.layout import LayoutOf, Snapshot, seal
from transport.messages import Beat, Offer, Piece
from transport.protocol import Protocol
from transport.transfers import Output, Send

FLOOD = 500
"""Messages that a flooding peer says to each neighbor whenever it has something to say or is asked for the time."""
OUT_OF_ROW = 2**40
"""Where the sequence numbers of old snapshots begin that are offered anew."""


class Liar(Protocol):
    """A peer's end of its edges that lies in the rounds of its rules. `round_of` is the round of an exchange."""

    def __init__(
        self,
        now: float,
        sends_to: Collection[int],
        layouts: Mapping[int, LayoutOf],
        settings: TransportSection,
        round_deadline_s: float,
        rules: list[Byzantine],
        round_of: Callable[[int], int],
        log: FaultLog,
    ) -> None:
        super().__init__(now, sends_to, layouts, settings, round_deadline_s)
        self._rules, self._round_of, self._log = rules, round_of, log
        self._told: set[tuple[str, int]] = set()
        self._said: list[Send] = []  # of the snapshots of earlier exchanges and of this one
        self._replays = 0

    def submit(self, now: float, snapshots: Mapping[int, Snapshot]) -> None:
        if self._lies("replay"):
            self._repeat()
        if len(snapshots) > 1 and self._lies("equivocate"):
            snapshots = {to: _changed(snapshot, to) for to, snapshot in snapshots.items()}
        super().submit(now, snapshots)

    def take(self) -> list[Output]:
        told: list[Output] = []
        for output in super().take():
            if isinstance(output, Send) and isinstance(output.message, Offer) and self._lies("wrong_shape"):
                output = _misshapen(output)
            if isinstance(output, Send) and isinstance(output.message, Offer | Piece) and self._rule("replay"):
                self._said.append(output)
            told.append(output)
        if told and self._lies("flood"):
            told += [Send(to, Beat(self.round, 0, 0.0)) for to in sorted(self.sends_to) for _ in range(FLOOD)]
        return told

    def _repeat(self) -> None:
        """All that was said of the snapshots before, as it was said, and offered once more as if it were new."""
        for said in self._said:
            self._outbox.put(said)
            if isinstance(said.message, Offer):
                self._replays += 1
                again = msgspec.structs.replace(said.message, sequence=OUT_OF_ROW + self._replays)
                self._outbox.put(Send(said.to, again))
        self._said.clear()

    def _rule(self, mode: str) -> Byzantine | None:
        return next((rule for rule in self._rules if rule.mode == mode), None)

    def _lies(self, mode: str) -> bool:
        """Whether it does so now; written down once a round."""
        round, rule = self._round_of(self.round), self._rule(mode)
        if rule is None or not in_rounds(round, rule.rounds) or (mode == "replay" and not self._said):
            return False
        if (rule.id, round) not in self._told:
            self._told.add((rule.id, round))
            self._log.write(rule, peer=rule.peer, round=round, mode=mode)
        return True


def _misshapen(send: Send) -> Send:
    offer: Any = send.message
    wrong = msgspec.structs.replace(offer, layout=offer.layout ^ 1, bytes=offer.bytes + 4)
    return Send(send.to, wrong, send.body, send.reply)


def _changed(snapshot: Snapshot, to: int) -> Snapshot:
    """The same but for the lowest bits of its first number, which are other ones for every neighbor."""
    if snapshot.block.size == 0:
        return snapshot
    block = np.array(snapshot.block)
    block[0] ^= 1 + to % 255
    return seal(snapshot.layout, block, snapshot.piece_bytes)


def lies_of(peer: int, faults: Iterable[object]) -> list[Byzantine]:
    """The rules by which a peer's transport lies."""
    told_elsewhere = get_args(Told)
    of_peer = [rule for rule in faults if isinstance(rule, Byzantine) and rule.peer == peer]
    return [rule for rule in of_peer if rule.mode not in told_elsewhere]
