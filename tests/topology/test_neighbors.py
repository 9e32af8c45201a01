"""A swarm knows its graph without networkx: built in a process of its own, the same graph, the same complaints."""

import os
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


def test_what_is_wrong_with_a_graph_is_said_by_the_process_that_asked(load_text: LoadText) -> None:
    with pytest.raises(TopologyError, match=r"^graph\.degree = 3: impossible") as caught:
        neighbors_in(load_text('[swarm]\npeers = 5\n[graph]\nkind = "k-regular"\ndegree = 3\n'))
    assert caught.value.args == (str(caught.value),)


def test_a_failure_of_that_process_is_not_taken_for_a_graph(
    load_text: LoadText, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Topology) -> None:
        raise OSError("the disk is gone")

    topology = load_text("")
    monkeypatch.setattr(graphs, "build", fail)
    with pytest.raises(RuntimeError, match="ended with status 1"):
        neighbors_in(topology)
    assert "OSError: the disk is gone" in capfd.readouterr().err
    monkeypatch.setattr(graphs, "build", lambda _: os.kill(os.getpid(), 9))
    with pytest.raises(RuntimeError, match="ended with status -9"):
        neighbors_in(topology)


def test_planning_a_swarm_does_not_load_networkx() -> None:
    code = (
        "import sys\n"
        "import launch.start, launch.supervisor\n"
        "from peer.plan import make_plan\n"
        "from topology import Topology\n"
        "make_plan(Topology.model_validate({'models': {'pool': ['mlp']}}))\n"
        "assert 'torch' in sys.modules\n"
        "sys.exit('networkx' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
