"""Faults of messages: what `[[fault]]` rules do to a message that has arrived, before the protocol hears of it.

Whether a rule fires is a keyed hash of the seed, the rule and the message's name, and no stream of random numbers: the
same message always gets the same verdict, however threads and networks interleave. Every verdict is logged first. No
socket and no thread: `transport.loop` asks for every message, and a test may ask in its place.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol as Interface

from topology.faults import Bandwidth, Corrupt, Delay, Duplicate, Fault, Loss, MessageRule, Partition, Reorder, Rule
from topology.reach import crossing, edges_of, in_rounds
from transport.messages import Ack, Beat, Credit, Decline, Leave, Message, Offer, Piece, Resend

Key = tuple[str, int, int, str, int, int, int, int]
"""Rule, sender, receiver, kind of message, round, sequence, piece, attempt; -1 where a message has no such thing."""
OF_MESSAGES = (Loss, Delay, Duplicate, Reorder, Corrupt)
KINDS = {Beat: "beat", Offer: "offer", Credit: "credit", Piece: "piece", Resend: "resend", Ack: "ack"} | {
    Decline: "decline",
    Leave: "leave",
}
REMEMBERED = 256  # transfers whose messages are counted; older ones are not on the wire any more
UNPACED = 2**32 - 1


class Log(Interface):
    """Where a verdict is written before it is carried out (`transport.faultlog`)."""

    def write(self, rule: Rule, *, peer: int, round: int | None, exact: bool = True, **facts: object) -> None: ...


@dataclass(frozen=True)
class Arrived:
    """A message as it came from a neighbor. `held_s`: how long it was kept back on purpose."""

    source: int
    incarnation: int
    message: Message
    body: memoryview | None = None
    held_s: float = 0.0


@dataclass
class _Held:
    arrived: Arrived
    since: float
    until: float
    overtaken_by: int | None = None
    """How many later messages of the edge may pass it; None where only the time counts."""


def draw(seed: int, key: Key, purpose: str = "") -> float:
    """A number in [0, 1) that depends on the seed and the message's name, and on nothing else."""
    spelled = json.dumps([*key, purpose]).encode()
    digest = hashlib.blake2b(spelled, key=str(seed).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def verdicts_of(folder: Path) -> dict[Key, float]:
    """What befell which message in a run that is over: the key of each, and how long it was held in milliseconds."""
    verdicts: dict[Key, float] = {}
    whole = (folder / "faults.jsonl").read_bytes().split(b"\n")[:-1]  # a last line torn by a kill is forgotten
    for line in map(json.loads, whole):
        if "attempt" in line:
            names = ("rule", "sender", "receiver", "message", "round", "sequence", "piece", "attempt")
            verdicts[tuple(line[name] for name in names)] = line.get("injected_ms", 0.0)
    return verdicts


@dataclass
class Faults:
    """What befalls the messages that come to one peer. `round_of`: the round of one of the transport's exchanges.

    With `replay` a rule fires where it did in another run, and nowhere else.
    """

    rules: Iterable[Fault]
    seed: int
    peer: int
    peers: int
    coordinator: int | None
    round_of: Callable[[int], int]
    log: Log
    replay: Mapping[Key, float] | None = None
    zero: float = 0.0
    """The time of the monotonic clock from which a partition's seconds count."""
    _held: list[_Held] = field(default_factory=list)
    _counts: dict[tuple[int, str, int, int], dict[int, int]] = field(default_factory=dict)
    _reached: set[tuple[str, str]] = field(default_factory=set)
    _cut: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rules = [rule for rule in self.rules if isinstance(rule, OF_MESSAGES)]
        self._partitions = {rule.id: rule for rule in self.rules if isinstance(rule, Partition)}
        self._paced = [rule for rule in self.rules if isinstance(rule, Bandwidth)]
        every = [(self.peer, other) for other in range(self.peers) if other != self.peer]
        self._across = {
            id: {other for _, other in crossing(rule.groups, every, self.peers)}
            for id, rule in self._partitions.items()
        }

    def __bool__(self) -> bool:
        return bool(self._rules or self._partitions or self._paced)

    # Asked by the sockets' thread.

    def arrive(self, now: float, number: int, arrived: Arrived) -> list[Arrived]:
        """A message of exchange `number` came: what the protocol is to hear now, in this order."""
        message, source = arrived.message, arrived.source
        round = self.round_of(number)
        if self._is_cut(now, source, message, round):
            return []
        sequence, piece = _place(message)
        attempt = self._count(source, KINDS[type(message)], round, sequence, piece)
        held: _Held | None = None
        copies = 1
        for rule in self._rules:
            kinds: Collection[str] = rule.messages if isinstance(rule, MessageRule) else ("piece",)
            if KINDS[type(message)] not in kinds or not in_rounds(round, rule.rounds):
                continue
            if not edges_of(rule.edges, [(source, self.peer)], self.coordinator):
                continue
            key = (rule.id, source, self.peer, KINDS[type(message)], round, sequence, piece, attempt)
            if not (key in self.replay if self.replay is not None else draw(self.seed, key) < rule.probability):
                continue
            match rule:
                case Loss():
                    self._note(rule, key)
                    return []
                case Corrupt() if arrived.body:
                    bit = int(draw(self.seed, key, "bit") * 8 * len(arrived.body))
                    self._note(rule, key, bit=bit)
                    damaged = bytearray(arrived.body)
                    damaged[bit // 8] ^= 1 << bit % 8
                    arrived = replace(arrived, body=memoryview(damaged))
                case Duplicate():
                    self._note(rule, key)
                    copies += 1
                case Delay():
                    delay_ms = rule.delay_ms + rule.jitter_ms * draw(self.seed, key, "jitter")
                    if self.replay is not None:
                        delay_ms = self.replay[key]
                    self._note(rule, key, injected_ms=float(f"{delay_ms:.4f}"))
                    begin = now if held is None else held.until
                    held = _Held(arrived, now, begin + delay_ms / 1e3)
                case Reorder() if held is None:
                    self._note(rule, key)
                    places = 1 + int(draw(self.seed, key, "places") * rule.window)
                    held = _Held(arrived, now, now + rule.hold_ms / 1e3, places)
        passing = self._overtake(now, source)
        if held is None:
            return [arrived] * copies + passing
        body = None if arrived.body is None else memoryview(bytes(arrived.body))  # the socket's memory is used again
        held.arrived = replace(arrived, body=body)
        self._held += [replace(held) for _ in range(copies)]
        return passing

    def release(self, now: float) -> list[Arrived]:
        """What was held long enough."""
        return self._let_go(now, [held for held in self._held if held.until <= now])

    def due(self) -> float:
        """When something is to be released at the latest."""
        return min((held.until for held in self._held), default=float("inf"))

    def rate(self, neighbor: int, number: int) -> int | None:
        """At how many bytes a second a connection to a neighbor is paced in an exchange; None if no rule ever says."""
        rules = [rule for rule in self._paced if edges_of(rule.edges, [(self.peer, neighbor)], self.coordinator)]
        rates = [rule.bytes_per_s for rule in rules if in_rounds(self.round_of(number), rule.rounds)]
        return None if not rules else min(rates, default=UNPACED)

    # Told by the peer's main thread.

    def reach(self, round: int, phase: str) -> None:
        """The peer has come to a point of a round: a partition may begin or end there for it, or a pace change."""
        for rule in self._partitions.values():
            for name, moment in (("at", rule.at), ("until", rule.until)):
                if moment is None or moment.round is None:
                    continue
                # Who was started again later, or whose method has no such phase, is past it in the next round.
                if round > moment.round or (round, phase) == (moment.round, moment.phase):
                    self._turn(rule, name, round)
        if phase == "begin":
            for paced in self._paced:
                if in_rounds(round, paced.rounds) and any(
                    edges_of(paced.edges, [(self.peer, other)], self.coordinator) for other in range(self.peers)
                ):
                    self.log.write(paced, peer=self.peer, round=round, bytes_per_s=paced.bytes_per_s)

    def _turn(self, rule: Partition, name: str, round: int | None) -> None:
        if (rule.id, name) in self._reached:
            return
        if self._across[rule.id]:
            moment = rule.at if name == "at" else rule.until
            exact = moment is not None and moment.exact
            if name == "at":
                self.log.write(rule, peer=self.peer, round=round, exact=exact, state="cut")
            else:
                dropped = self._cut.get(rule.id, 0)
                self.log.write(rule, peer=self.peer, round=round, exact=exact, state="healed", dropped=dropped)
        self._reached.add((rule.id, name))

    def _is_cut(self, now: float, source: int, message: Message, round: int) -> bool:
        cut = False
        for rule in self._partitions.values():
            for name, moment in (("at", rule.at), ("until", rule.until)):
                if moment is not None and moment.seconds is not None and now - self.zero >= moment.seconds:
                    self._turn(rule, name, None)
            if source in self._across[rule.id]:
                inside = (rule.id, "at") in self._reached and (rule.id, "until") not in self._reached
                if inside or (isinstance(message, Offer | Piece) and _covers(rule, round)):
                    self._cut[rule.id] = self._cut.get(rule.id, 0) + 1
                    cut = True
        return cut

    def _count(self, source: int, kind: str, round: int, sequence: int, piece: int) -> int:
        """How many times this very message came before."""
        transfer = (source, kind, round, sequence)
        counts = self._counts.setdefault(transfer, {})
        if len(self._counts) > REMEMBERED:
            del self._counts[next(iter(self._counts))]
        counts[piece] = counts.get(piece, -1) + 1
        return counts[piece]

    def _overtake(self, now: float, source: int) -> list[Arrived]:
        over = []
        for held in self._held:
            if held.arrived.source == source and held.overtaken_by is not None:
                held.overtaken_by -= 1
                if held.overtaken_by <= 0:
                    over.append(held)
        return self._let_go(now, over)

    def _let_go(self, now: float, over: list[_Held]) -> list[Arrived]:
        if not over:
            return []
        chosen = {id(held) for held in over}
        self._held = [held for held in self._held if id(held) not in chosen]
        ordered = sorted(over, key=lambda held: held.until)
        return [replace(held.arrived, held_s=now - held.since) for held in ordered]

    def _note(self, rule: Rule, key: Key, **facts: float) -> None:
        _, sender, receiver, message, round, sequence, piece, attempt = key
        self.log.write(
            rule, peer=receiver, round=round, sender=sender, receiver=receiver, message=message, sequence=sequence,
            piece=piece, attempt=attempt, exact=True, **facts,
        )  # fmt: skip


def _covers(rule: Partition, round: int) -> bool:
    """Whether a snapshot of this round is of the time of the cut, whoever is already out of it or not yet in it."""
    if rule.at.round is None or (rule.until is not None and rule.until.round is None):
        return False
    first = rule.at.round + (rule.at.phase != "begin")
    return first <= round and (rule.until is None or rule.until.round is None or round < rule.until.round)


def _place(message: Message) -> tuple[int, int]:
    """The sequence number and the piece that a message is about."""
    match message:
        case Piece(sequence=sequence, index=piece) | Credit(sequence=sequence, limit=piece):
            return sequence, piece
        case Resend(sequence=sequence, indices=indices):
            return sequence, min(indices, default=-1)
        case Offer(sequence=sequence) | Ack(sequence=sequence) | Decline(sequence=sequence):
            return sequence, -1
        case Beat() | Leave():
            return -1, -1
