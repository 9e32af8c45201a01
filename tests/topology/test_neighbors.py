"""A swarm knows its graph without networkx: the same graph, the same complaints."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from topology import Topology, TopologyError, graphs
from topology.neighbors import neighbors_in

LoadText = Callable[..., Topology]


@pytest.mark.parametrize("kind", ["ring", "star", "exponential", "small-world"])
def test_it_is_the_graph_that_networkx_builds(load_text: LoadText, kind: str) -> None:
    topology = load_text(f'[swarm]\npeers = 9\n[graph]\nkind = "{kind}"\n')
    built, found = graphs.build(topology), neighbors_in(topology)
    assert found.edges == tuple(built.edges(data="weight"))  # the weights to the last bit
    assert found.receivers == tuple(tuple(built.successors(peer)) for peer in range(9))
    assert found.senders == tuple(tuple(built.predecessors(peer)) for peer in range(9))


def test_one_way_edges_have_a_direction(load_text: LoadText) -> None:
    edges = "".join(f"[[edge]]\nfrom = {i}\nto = {(i + 1) % 3}\n" for i in range(3))
    found = neighbors_in(load_text(f'[swarm]\npeers = 3\n[graph]\nkind = "edges"\ndirected = true\n{edges}'))
    assert found.receivers == ((1,), (2,), (0,))
    assert found.senders == ((2,), (0,), (1,))


def test_what_is_wrong_with_a_graph_is_said(load_text: LoadText) -> None:
    with pytest.raises(TopologyError, match=r"^graph\.degree = 3: impossible") as caught:
        neighbors_in(load_text('[swarm]\npeers = 5\n[graph]\nkind = "k-regular"\ndegree = 3\n'))
    assert caught.value.args == (str(caught.value),)


def test_networkx_is_unloaded_unless_it_was_there_before() -> None:
    code = (
        "import sys\n"
        "from topology import Topology, TopologyError\n"
        "from topology.neighbors import neighbors_in\n"
        "def loaded(): return [name for name in sys.modules if name == 'topology.graphs' or name[:8] == 'networkx']\n"
        "ring = Topology.model_validate({'graph': {'kind': 'ring'}})\n"
        "first = neighbors_in(ring)\n"
        "assert not loaded(), loaded()\n"
        "try: neighbors_in(Topology.model_validate({'graph': {'kind': 'k-regular', 'degree': 99}}))\n"
        "except TopologyError: pass\n"
        "else: raise AssertionError('degree 99 of 10 peers')\n"
        "assert not loaded(), loaded()\n"
        "from topology import graphs\n"
        "assert neighbors_in(ring) == first == neighbors_in(ring)\n"
        "import networkx, topology\n"
        "assert topology.graphs is graphs and graphs.nx is networkx and graphs.is_connected(graphs.build(ring))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
