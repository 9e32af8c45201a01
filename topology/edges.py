"""Edges as the user lists them, in `[[edge]]` or in an edge-list file; each mistake is said with its place."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from topology.errors import TopologyError, raise_any


@dataclass(frozen=True)
class Edge:
    """`sender` sends to `receiver`, which gives it `weight` when mixing. `where` is its place in the input."""

    sender: int
    receiver: int
    weight: float | None
    where: str


def edge_mistakes(edges: Iterable[Edge], peers: int, directed: bool) -> Iterator[str]:
    """Say what is wrong with edges that were listed by hand, one line a mistake."""
    first: dict[tuple[int, int], Edge] = {}
    for edge in edges:
        ends = (edge.sender, edge.receiver)
        for end in dict.fromkeys(ends):
            if not 0 <= end < peers:
                yield f"{edge.where}: there is no peer {end}; with swarm.peers = {peers} they are 0 to {peers - 1}"
        if edge.sender == edge.receiver:
            yield f"{edge.where}: joins peer {edge.sender} to itself; an edge needs two different peers"
            continue
        other = first.setdefault(ends if directed else (min(ends), max(ends)), edge)
        if other is not edge:
            both = "" if directed else "; without graph.directed = true an edge goes both ways"
            yield f"{edge.where}: is there already, at {other.where}; list each edge once{both}"


def read_edges(path: Path) -> list[Edge]:
    """Read an edge list in networkx's format: `0 1`, `0 1 0.5` or `0 1 {'weight': 0.5}` a line, # comments."""
    key = f"graph.path = {str(path)!r}"
    try:
        text = path.read_text("utf-8-sig")
    except FileNotFoundError:
        raise TopologyError(f"{key}: there is no such file; a path is relative to the topology file") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise TopologyError(f"{key}: cannot be read: {reason}; it must be a text file with one edge a line") from error
    edges, mistakes = [], []
    for number, line in enumerate(text.splitlines(), start=1):
        fields = line.split("#")[0].split(maxsplit=2)
        if not fields:
            continue
        where = f"graph.path: {path.name} line {number}"
        try:
            sender, receiver, *rest = fields
            edges.append(Edge(int(sender), int(receiver), _read_weight(*rest), where))
        except ValueError:
            mistakes.append(
                f"{where}: {line.strip()!r} is not an edge; write two peers and, if you like, a weight above 0 "
                "and at most 1: 0 1, or 0 1 0.5, or 0 1 {'weight': 0.5}"
            )
    raise_any(mistakes)
    return edges


def _read_weight(text: str = "{}") -> float | None:
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(text) from error
    weight = value.get("weight") if isinstance(value, dict) else value
    if weight is None and isinstance(value, dict):
        return None
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= 1:
        raise ValueError(text)
    return float(weight)
