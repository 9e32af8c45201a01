"""Who sends to whom, and what each gives what it gets: the graph as the processes of a swarm keep it.

networkx builds graphs but is not needed to read one, and would cost a swarm 12 MB once and 1 MB in every process.
So it is unloaded when the graph is built. Do that before torch is imported, which then takes the memory over.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from topology.file import Topology

WeightedEdge = tuple[int, int, float]
"""(sender, receiver, the weight that the receiver gives it when it mixes)"""


@dataclass(frozen=True)
class Neighbors:
    """The directed edges between peers 0 to `peers` - 1."""

    peers: int
    edges: tuple[WeightedEdge, ...]

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Every edge as sender and receiver."""
        return tuple((sender, receiver) for sender, receiver, _ in self.edges)

    @cached_property
    def receivers(self) -> tuple[tuple[int, ...], ...]:
        """For each peer, whom it sends to."""
        return self._others((sender, receiver) for sender, receiver, _ in self.edges)

    @cached_property
    def senders(self) -> tuple[tuple[int, ...], ...]:
        """For each peer, whom it hears."""
        return self._others((receiver, sender) for sender, receiver, _ in self.edges)

    def _others(self, pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
        others: list[list[int]] = [[] for _ in range(self.peers)]
        for peer, other in pairs:
            others[peer].append(other)
        return tuple(map(tuple, others))

    @cached_property
    def mixing(self) -> NDArray[np.float64]:
        """W[j, i] is the weight that j gives i; what is left of 1 is its own, W[j, j]. Rows sum to 1."""
        matrix = np.zeros((self.peers, self.peers))
        for sender, receiver, weight in self.edges:
            matrix[receiver, sender] = weight
        np.fill_diagonal(matrix, np.maximum(0.0, 1.0 - matrix.sum(axis=1)))
        return matrix


def neighbors_in(topology: Topology) -> Neighbors:
    """Build the graph that a topology describes, and unload what was loaded for that. Raises `TopologyError`."""
    before = set(sys.modules)
    try:
        graphs = importlib.import_module("topology.graphs")
        return Neighbors(topology.swarm.peers, tuple(graphs.build(topology).edges(data="weight")))
    finally:
        _unload({name for name in set(sys.modules) - before if name.split(".")[0] == "networkx"} | {"topology.graphs"})


def _unload(names: set[str]) -> None:
    """Forget modules; whoever imports them again gets them anew. What they held is free once it is collected."""
    if "networkx" in names:  # else it was there before, and others use it
        for name in names:
            del sys.modules[name]
        del sys.modules["topology"].graphs
        gc.collect()
