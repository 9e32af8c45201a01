"""Who sends to whom, and what each gives what it gets: the graph as the processes of a swarm keep it.

networkx builds graphs but is not needed to read one, and would cost a swarm 12 MB once and 1 MB in every process.
So it is loaded in a process of its own, which ends when the graph is built.
"""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from topology.errors import TopologyError
from topology.file import Topology

WeightedEdge = tuple[int, int, float]
"""(sender, receiver, the weight that the receiver gives it when it mixes)"""


@dataclass(frozen=True)
class Neighbors:
    """The directed edges between peers 0 to `peers` - 1."""

    peers: int
    edges: tuple[WeightedEdge, ...]

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
    """Build the graph that a topology describes. Raises `TopologyError`."""
    answer = json.loads(_in_a_process_of_its_own(lambda: _built(topology)))
    if "mistake" in answer:
        raise TopologyError(answer["mistake"])
    return Neighbors(topology.swarm.peers, tuple((i, j, weight) for i, j, weight in answer["edges"]))


def _built(topology: Topology) -> str:
    from topology import graphs

    try:
        return json.dumps({"edges": list(graphs.build(topology).edges(data="weight"))})
    except TopologyError as error:
        return json.dumps({"mistake": str(error)})


def _in_a_process_of_its_own(work: Callable[[], str]) -> str:
    """What `work` returns in a fork of this process. Should this process die, the other ends with its work."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
            os.close(reader)
            with os.fdopen(writer, "w") as answer:
                answer.write(work())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    _, ended = os.waitpid(child, 0)
    if ended != 0:
        status = os.waitstatus_to_exitcode(ended)
        raise RuntimeError(f"the process that builds the graph ended with status {status}; it has said why above")
    return text
