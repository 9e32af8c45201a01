"""Builds the graph of a swarm: always the same for the same file, and no peer in it is without a neighbor.

An edge (i, j) means that i sends to j; its attribute `weight` is what j gives i when it mixes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from topology import sections
from topology.edges import Edge, edge_mistakes, read_edges
from topology.errors import TopologyError, raise_any
from topology.faults import unmatched
from topology.file import Topology
from topology.seeds import stream_seed

DRAWS = 100
ROUNDING = 1e-9  # weights such as 0.7, 0.2 and 0.1 do not add up to 1 exactly


def build(topology: Topology) -> nx.DiGraph[int]:
    """Build the graph that `[graph]` and `[[edge]]` describe. Raises `TopologyError`."""
    peers = topology.swarm.peers
    if peers < 2:
        raise TopologyError(f"swarm.peers = {peers}: a peer alone has no neighbor; a swarm takes at least 2")
    weighted = topology.listed_edges
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(peers))
    match topology.graph:
        case sections.EdgesGraph():
            listed, weighted = weighted, []
            _add_listed(graph, listed, topology.directed)
        case sections.FileGraph(path=path):
            listed = read_edges(Path(path))
            raise_any(edge_mistakes(listed, peers, topology.directed))
            _add_listed(graph, listed, topology.directed)
        case sections.ExponentialGraph():
            hops = [2**k for k in range((peers - 1).bit_length())]
            graph.add_edges_from((i, (i + hop) % peers) for i in range(peers) for hop in hops)
        case generated:
            rng = random.Random(stream_seed(topology.swarm.seed, "graph"))
            drawn = _generate(generated, peers, rng)
            if isinstance(generated, sections.StarGraph) and topology.coordinator:
                drawn = nx.relabel_nodes(drawn, {0: topology.coordinator, topology.coordinator: 0})
            graph.add_edges_from(drawn.to_directed().edges)
    raise_any(_isolated(graph, topology))
    raise_any(_set_weights(graph, weighted, topology))
    raise_any(unmatched(topology.fault, list(graph.edges), topology.coordinator))
    return graph


def spectral_gap(matrix: NDArray[np.float64]) -> float:
    """1 - the second largest |eigenvalue|: 0 where some peers never hear of each other, 1 for the complete graph."""
    symmetric = np.array_equal(matrix, matrix.T)
    eigenvalues = np.linalg.eigvalsh(matrix) if symmetric else np.linalg.eigvals(matrix)
    return max(0.0, float(1.0 - np.sort(np.abs(eigenvalues))[-2]))


def is_connected(graph: nx.DiGraph[int]) -> bool:
    """Whether what any peer knows can reach every other, along the direction of the edges."""
    return bool(nx.is_strongly_connected(graph))


def _generate(section: sections.Section, peers: int, rng: random.Random) -> nx.Graph[int]:
    match section:
        case sections.CompleteGraph():
            return nx.complete_graph(peers)
        case sections.RingGraph():
            return nx.cycle_graph(peers)
        case sections.LineGraph():
            return nx.path_graph(peers)
        case sections.StarGraph():
            return nx.star_graph(peers - 1)
        case sections.TreeGraph(branching=branching):
            return nx.full_rary_tree(branching, peers)
        case sections.KRegularGraph(degree=degree):
            return _k_regular(peers, degree, rng)
        case sections.SmallWorldGraph(degree=degree, rewire=rewire):
            return _small_world(peers, degree, rewire, rng)
        case sections.ErdosRenyiGraph(probability=probability):
            draws = (nx.gnp_random_graph(peers, probability, seed=rng) for _ in range(DRAWS))
            needed = math.log(peers) / peers
            return _first_connected(
                draws,
                f"graph.probability = {probability}",
                f"with {peers} peers it takes about {needed:.2g} or more (ln(peers) / peers)",
            )
    raise AssertionError(section)


def _k_regular(peers: int, degree: int, rng: random.Random) -> nx.Graph[int]:
    least = min(2, peers - 1)  # pairs of peers are not connected to other pairs
    if not least <= degree < peers or peers * degree % 2:
        parity = "an even number" if peers % 2 else "a whole number"
        raise TopologyError(
            f"graph.degree = {degree}: impossible for a connected k-regular graph with swarm.peers = {peers}: "
            f"must be {parity} from {least} to {peers - 1}" + (", for peers * degree is even" if peers % 2 else "")
        )
    # The few absent edges of a dense graph are drawn, not the many present ones: the draw seldom fails then.
    absent = peers - 1 - degree
    draws = (
        nx.complement(nx.random_regular_graph(absent, peers, seed=rng))
        if absent < degree
        else nx.random_regular_graph(degree, peers, seed=rng)
        for _ in range(DRAWS)
    )
    return _first_connected(draws, f"graph.degree = {degree}", "take a higher one, or graph.kind = 'ring'")


def _small_world(peers: int, degree: int, rewire: float, rng: random.Random) -> nx.Graph[int]:
    if not 2 <= degree < peers or degree % 2:
        most = (peers - 1) // 2 * 2
        raise TopologyError(
            f"graph.degree = {degree}: impossible for a small-world graph with swarm.peers = {peers}: "
            + (f"must be an even number from 2 to {most}, half on either side" if most else "takes 3 peers or more")
        )
    draws = (nx.watts_strogatz_graph(peers, degree, rewire, seed=rng) for _ in range(DRAWS))
    return _first_connected(draws, f"graph.rewire = {rewire}", "take a lower one, or a higher graph.degree")


def _first_connected(draws: Iterable[nx.Graph[int]], key: str, advice: str) -> nx.Graph[int]:
    for graph in draws:
        if nx.is_connected(graph):
            return graph
    raise TopologyError(f"{key}: none of {DRAWS} graphs drawn was connected; {advice}")


def _add_listed(graph: nx.DiGraph[int], edges: Iterable[Edge], directed: bool) -> None:
    for edge in edges:
        for sender, receiver in _ways(edge, directed):
            graph.add_edge(sender, receiver, weight=edge.weight)


def _ways(edge: Edge, directed: bool) -> list[tuple[int, int]]:
    ends = (edge.sender, edge.receiver)
    return [ends] if directed else [ends, ends[::-1]]


def _isolated(graph: nx.DiGraph[int], topology: Topology) -> Iterator[str]:
    alone = [str(peer) for peer, degree in graph.degree if degree == 0]
    if alone:
        key = f"graph.path = {topology.graph.path!r}" if topology.graph.kind == "file" else "graph.kind = 'edges'"
        who = f"peer {alone[0]} is" if len(alone) == 1 else f"peers {', '.join(alone[:10])} are"
        more = f" (and {len(alone) - 10} more)" if len(alone) > 10 else ""
        add = "lines to the file" if topology.graph.kind == "file" else "[[edge]] entries"
        yield (
            f"{key}: {who} isolated{more}; each of the peers 0 to {len(graph) - 1} needs an edge at least: "
            f"add {add}, or lower swarm.peers"
        )


def _set_weights(graph: nx.DiGraph[int], weighted: Iterable[Edge], topology: Topology) -> Iterator[str]:
    """Take the weights that were given; the others are Metropolis-Hastings', or uniform where edges are one-way."""
    for edge in weighted:
        if edge.weight is None:
            yield (
                f"{edge.where}: weight is missing; with graph.kind = {topology.graph.kind!r} an [[edge]] gives "
                "an edge its weight. To list the edges yourself, set graph.kind = 'edges'"
            )
        for sender, receiver in _ways(edge, topology.directed):
            if not graph.has_edge(sender, receiver):
                to = ", ".join(map(str, sorted(graph.successors(sender))))
                yield f"{edge.where}: the {topology.graph.kind} graph has no such edge; peer {sender} sends to {to}"
                break
            graph.edges[sender, receiver]["weight"] = edge.weight
    place = "graph.path" if topology.graph.kind == "file" and not topology.edge else "[[edge]]"
    symmetric = all(graph.has_edge(receiver, sender) for sender, receiver in graph.edges)
    degrees = dict(graph.in_degree)
    for receiver in graph:
        given = {sender: graph.edges[sender, receiver].get("weight") for sender in sorted(graph.predecessors(receiver))}
        total = sum(weight for weight in given.values() if weight is not None)
        without = [str(sender) for sender, weight in given.items() if weight is None]
        if total > 1 + ROUNDING:
            yield f"{place}: weight: those into peer {receiver} add up to {total:.6g}; at most 1 is allowed"
        if 0 < len(without) < len(given):
            yield (
                f"{place}: weight: into peer {receiver} some edges have one, but not those from {', '.join(without)}; "
                "give one to all edges into a peer, or to none"
            )
        if len(without) == len(given):
            for sender in given:
                degree = max(degrees[sender], degrees[receiver]) if symmetric else degrees[receiver]
                graph.edges[sender, receiver]["weight"] = 1 / (1 + degree)
