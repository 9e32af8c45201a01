"""What the texts of a fault reach: the edges of a pattern, the rounds of a range, the edges a partition cuts."""

import re
from collections.abc import Iterable, Iterator

EdgePair = tuple[int, int]

_END = r"(\*|coordinator|\d+|\{\d+(,\d+)*\})"
EDGES = re.compile(rf"^\s*{_END}\s*(<->|->)\s*{_END}\s*$")
ROUNDS = re.compile(r"^(\d+)(-(\d*))?$")


def bounds(rounds: str) -> tuple[int, int]:
    """The first and the last round of a text such as '2-9'."""
    match = ROUNDS.match(rounds)
    assert match is not None, rounds
    first = int(match[1])
    return first, first if match[2] is None else int(match[3] or 2**31)


def in_rounds(round: int, rounds: str) -> bool:
    """Whether a round is one of those."""
    first, last = bounds(rounds)
    return first <= round <= last


def edges_of(patterns: Iterable[str], edges: Iterable[EdgePair], coordinator: int | None) -> frozenset[EdgePair]:
    """The edges that any of the patterns means."""
    edges = list(edges)
    return frozenset(edge for pattern in patterns for edge in _matching(pattern, edges, coordinator))


def _matching(pattern: str, edges: list[EdgePair], coordinator: int | None) -> Iterator[EdgePair]:
    match = EDGES.match(pattern)
    assert match is not None, pattern
    left, right, both = match[1], match[4], match[3] == "<->"
    for sender, receiver in edges:
        forwards = _means(left, sender, coordinator) and _means(right, receiver, coordinator)
        backwards = _means(left, receiver, coordinator) and _means(right, sender, coordinator)
        if forwards or (both and backwards):
            yield sender, receiver


def _means(end: str, peer: int, coordinator: int | None) -> bool:
    if end == "*":
        return True
    if end == "coordinator":
        return peer == coordinator
    return peer in named(end)


def named(end: str) -> frozenset[int]:
    """The peers that one end of a pattern names by number."""
    return frozenset(int(number) for number in re.findall(r"\d+", end))


def crossing(groups: list[list[int]] | str, edges: Iterable[EdgePair], peers: int) -> frozenset[EdgePair]:
    """The edges that a partition cuts: those between two groups. A peer in no group is cut from nobody."""
    group = _groups(groups, peers)
    return frozenset((i, j) for i, j in edges if i in group and j in group and group[i] != group[j])


def _groups(groups: list[list[int]] | str, peers: int) -> dict[int, int]:
    if isinstance(groups, list):
        return {peer: number for number, members in enumerate(groups) for peer in members}
    kind, _, chosen = groups.partition(":")
    if kind == "isolate":
        return {peer: int(peer == int(chosen)) for peer in range(peers)}
    others = [peer for peer in range(peers) if kind == "halves" or peer != int(chosen)]
    return {peer: int(place >= (len(others) + 1) // 2) for place, peer in enumerate(others)}
