"""The fault plan, `[[fault]]`: what breaks, where and when, as the file says it.

Which edges a pattern means, and which rounds a text means, is `topology.reach`; what a fault does is `transport.faults`
(messages and connections) and `peer.faults` (processes and what they say).
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from topology.reach import EDGES, ROUNDS, EdgePair, bounds, edges_of, named
from topology.sections import Count, Fraction, Name, Seconds, Section

MESSAGES = ("beat", "offer", "credit", "piece", "resend", "ack", "decline", "leave")
Message = Literal["beat", "offer", "credit", "piece", "resend", "ack", "decline", "leave"]
Told = Literal["nan", "scale", "sign_flip", "stale", "lying_statistics", "label_flip"]
"""Lies in what a peer has learnt; the others are told by its transport."""
Phase = Literal["begin", "statistics", "send", "gather", "teachers", "train", "evaluate", "end"]
"""A point of a round that a peer reaches: `begin` on entering it, `gather` before the first wait, `end` after its
checkpoint, every other one before the first work that is booked under that name."""

EdgePattern = Annotated[
    str,
    Field(
        pattern=EDGES.pattern,
        description="edges such as '3->7', '{1,2}<->{3,4}', '*->5', 'coordinator->*'",
    ),
]
Rounds = Annotated[
    str,
    Field(pattern=ROUNDS.pattern, description="rounds in quotes: '3', '2-9', or '4-' for all from there on"),
]


class Moment(Section):
    """When: `round` and `phase` are exact; `seconds` since the run began are not, and are marked so."""

    round: Count | None = None
    phase: Phase = "begin"
    seconds: Seconds | None = None

    @model_validator(mode="after")
    def _one_clock(self) -> Self:
        if (self.round is None) == (self.seconds is None):
            raise ValueError("a moment has either a round, with a phase if need be, or seconds")
        return self

    @property
    def exact(self) -> bool:
        return self.round is not None


def _exact(moment: Moment) -> Moment:
    if not moment.exact:
        raise ValueError("needs a round, such as {round = 3, phase = 'train'}, and no seconds")
    return moment


ExactMoment = Annotated[Moment, AfterValidator(_exact)]


class Rule(Section):
    """What every fault has: a name of its own, under which it is drawn, logged and counted."""

    id: Name


class EdgeRule(Rule):
    """A fault on the edges that one of the patterns means, in some rounds."""

    edges: list[EdgePattern] = Field(default=["*->*"], min_length=1)
    rounds: Rounds = "1-"

    @field_validator("rounds")
    @classmethod
    def _forwards(cls, rounds: str) -> str:
        first, last = bounds(rounds)
        if first < 1 or last < first:
            raise ValueError("rounds count from 1, and a range goes up")
        return rounds


class MessageRule(EdgeRule):
    """A fault that befalls single messages, each with the same probability, on arrival."""

    messages: list[Message] = Field(default=["piece"], min_length=1)
    probability: Fraction = 1.0


class Loss(MessageRule):
    """Messages vanish after they were received. This is not packet loss: TCP has delivered them."""

    kind: Literal["loss"]


class Delay(MessageRule):
    """Messages are held back for `delay_ms`, and up to `jitter_ms` longer, uniformly."""

    kind: Literal["delay"]
    delay_ms: float = Field(gt=0, le=600_000)
    jitter_ms: float = Field(0.0, ge=0, le=600_000)


class Duplicate(MessageRule):
    """Messages are handed over twice."""

    kind: Literal["duplicate"]


class Reorder(MessageRule):
    """Messages are held back until up to `window` later ones of the edge have overtaken them, for `hold_ms` at most."""

    kind: Literal["reorder"]
    window: int = Field(4, ge=1, le=64)
    hold_ms: float = Field(200.0, gt=0, le=10_000)


class Corrupt(EdgeRule):
    """One bit of a piece is flipped before its checksum is looked at."""

    kind: Literal["corrupt"]
    probability: Fraction = 1.0


class Bandwidth(EdgeRule):
    """The kernel paces what is sent along an edge (SO_MAX_PACING_RATE on its socket)."""

    kind: Literal["bandwidth"]
    layer: Literal["kernel"] = "kernel"
    bytes_per_s: int = Field(ge=1000)


class Partition(Rule):
    """No message crosses between groups from `at` until `until`: both ends drop what comes."""

    kind: Literal["partition"]
    groups: list[list[int]] | Annotated[str, Field(pattern=r"^(halves|isolate:\d+|bridge:\d+)$")] = Field(
        description="lists of peers such as [[0, 1], [2, 3]], 'halves', 'isolate:ID', or 'bridge:ID' (two halves that "
        "hear each other through that peer only)"
    )
    at: Moment
    until: Moment | None = None


class StreamRule(EdgeRule):
    """A fault in the TCP stream of an edge, made by a proxy that stands in it. It happens `times` times."""

    layer: Literal["stream"] = "stream"
    times: Count = 1


class Reset(StreamRule):
    """The connection is reset (RST) after that many bytes of the sender."""

    kind: Literal["reset"]
    after_bytes: int = Field(ge=0)


class Truncate(StreamRule):
    """The connection is closed in order (FIN) after that many bytes of the sender: half a message arrives."""

    kind: Literal["truncate"]
    after_bytes: int = Field(ge=0)


class Flip(StreamRule):
    """All bits of the byte at that place of the sender's stream are flipped."""

    kind: Literal["flip"]
    at_byte: int = Field(ge=0)


class Blackhole(StreamRule):
    """After that many bytes of the sender nothing passes any more for `for_s`, in either direction; nothing closes."""

    kind: Literal["blackhole"]
    after_bytes: int = Field(ge=0)
    for_s: Seconds


class PeerRule(Rule):
    """A fault of one peer."""

    peer: int = Field(ge=0)


class Crash(PeerRule):
    """The peer kills itself (SIGKILL), and is not started again."""

    kind: Literal["crash"]
    at: ExactMoment


class Stall(PeerRule):
    """The learning stands still for `for_s`; the transport's thread goes on saying so."""

    kind: Literal["stall"]
    at: ExactMoment
    for_s: Seconds


class SlowReader(PeerRule):
    """The peer takes `delay_ms` longer over every snapshot it has got before it lets its memory go."""

    kind: Literal["slow_reader"]
    rounds: Rounds = "1-"
    delay_ms: float = Field(gt=0, le=600_000)


class Byzantine(PeerRule):
    """The peer says what is not so.

    `nan`, `scale`, `sign_flip`, `stale`: the weights it shares. `lying_statistics`: accuracy 1 on `samples` samples for
    every class. `label_flip`: it learns from labels moved on by one class. `wrong_shape`, `equivocate`, `replay`,
    `flood`: what its transport says.
    """

    kind: Literal["byzantine"]
    mode: Literal[
        "nan", "scale", "sign_flip", "stale", "lying_statistics", "label_flip", "wrong_shape", "equivocate", "replay",
        "flood",
    ]  # fmt: skip
    rounds: Rounds = "1-"
    factor: float = -10.0
    samples: int = Field(1000, ge=1)


Fault = Annotated[
    Loss
    | Delay
    | Duplicate
    | Reorder
    | Corrupt
    | Bandwidth
    | Partition
    | Reset
    | Truncate
    | Flip
    | Blackhole
    | Crash
    | Stall
    | SlowReader
    | Byzantine,
    Field(discriminator="kind"),
]


def fault_mistakes(faults: Iterable[Fault], peers: int, rounds: int, coordinator: int | None) -> Iterator[str]:
    """What a fault says that the rest of the file does not bear out."""
    seen: set[str] = set()
    allowed = f"with swarm.peers = {peers} the ids are 0 to {peers - 1}"
    for fault in faults:
        label = f"[[fault]] {fault.id}:"
        if fault.id in seen:
            yield f"{label} id = {fault.id!r}: another fault has this id; give each its own"
        seen.add(fault.id)
        for key, peer in _peers_named(fault):
            if peer >= peers:
                who = "such peer" if key.startswith("peer") else f"peer {peer}"
                yield f"{label} {key}: there is no {who}; {allowed}"
        if isinstance(fault, Partition) and isinstance(fault.groups, list):
            members = [peer for group in fault.groups for peer in group]
            if len(set(members)) != len(members) or len(fault.groups) < 2:
                yield f"{label} groups = {fault.groups}: must be two or more groups, and no peer in two of them"
        spoken_of = [edge for edge in getattr(fault, "edges", []) if "coordinator" in edge]
        if spoken_of and coordinator is None:
            yield f"{label} edges = {spoken_of[0]!r}: the swarm has no coordinator; name the peers by number"
        for key, round in _rounds_named(fault):
            if round > rounds:
                yield f"{label} {key}: that round never comes; swarm.rounds = {rounds}"


def unmatched(faults: Iterable[Fault], edges: Sequence[EdgePair], coordinator: int | None) -> Iterator[str]:
    """The edges a fault names that the graph does not have."""
    for fault in faults:
        if isinstance(fault, EdgeRule):
            for pattern in fault.edges:
                if not edges_of([pattern], edges, coordinator):
                    yield f"[[fault]] {fault.id}: edges = {pattern!r}: the graph has no such edge"


def without_tcp(faults: Iterable[Fault]) -> Iterator[str]:
    """What only befalls TCP connections, where there are none."""
    for fault in faults:
        if isinstance(fault, Reset | Truncate | Flip | Blackhole | Bandwidth):
            yield f"[[fault]] {fault.id}: kind = {fault.kind!r}: befalls TCP connections; set transport.kind = 'tcp'"


def _peers_named(fault: Fault) -> Iterator[tuple[str, int]]:
    if isinstance(fault, PeerRule):
        yield f"peer = {fault.peer}", fault.peer
    if isinstance(fault, EdgeRule):
        for pattern in fault.edges:
            for peer in sorted(named(pattern)):
                yield f"edges = {pattern!r}", peer
    if isinstance(fault, Partition):
        groups = fault.groups
        listed = [peer for group in groups for peer in group] if isinstance(groups, list) else sorted(named(groups))
        for peer in listed:
            yield f"groups = {groups!r}", peer


def _rounds_named(fault: Fault) -> Iterator[tuple[str, int]]:
    if isinstance(fault, EdgeRule | SlowReader | Byzantine):
        yield f"rounds = {fault.rounds!r}", bounds(fault.rounds)[0]
    for key in ("at", "until"):
        moment: Moment | None = getattr(fault, key, None)
        if moment is not None and moment.round is not None:
            phase = f", phase = {moment.phase!r}" if "phase" in moment.model_fields_set else ""
            yield f"{key} = {{round = {moment.round}{phase}}}", moment.round
