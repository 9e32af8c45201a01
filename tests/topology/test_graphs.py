import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from topology import Topology, TopologyError
from topology.graphs import build, is_connected, spectral_gap
from topology.neighbors import Neighbors

thorough = settings(max_examples=150, deadline=None, derandomize=True, database=None)
LoadText = Callable[..., Topology]
Pairs = set[tuple[int, int]]
CONNECTED = ["complete", "ring", "line", "star", "tree", "k-regular", "small-world", "erdos-renyi", "exponential"]


def topology(peers: int, seed: int = 1024, edges: Sequence[Mapping[str, object]] = (), **graph: Any) -> Topology:
    return Topology.model_validate(
        {"swarm": {"peers": peers, "seed": seed}, "graph": graph, "edge": list(edges)},
    )


@st.composite
def generated(draw: st.DrawFn) -> Topology:
    peers, kind, seed = draw(st.integers(2, 30)), draw(st.sampled_from(CONNECTED)), draw(st.integers(0, 2**63 - 1))
    graph: dict[str, Any] = {"kind": kind}
    if kind == "tree":
        graph["branching"] = draw(st.integers(1, 5))
    elif kind == "k-regular":
        graph["degree"] = draw(st.integers(min(2, peers - 1), peers - 1))
        assume(peers * graph["degree"] % 2 == 0)
    elif kind == "small-world":
        assume(peers > 4)
        graph |= {"degree": 2 * draw(st.integers(2, (peers - 1) // 2)), "rewire": draw(st.floats(0, 0.5))}
    elif kind == "erdos-renyi":
        graph["probability"] = draw(st.floats(0.5, 1))
    return topology(peers, seed, **graph)


def mixing_matrix(graph: "nx.DiGraph[int]") -> np.ndarray:
    return Neighbors(len(graph), tuple(graph.edges(data="weight"))).mixing


def pairs(edges: list[tuple[int, int]], both: bool = True) -> Pairs:
    return set(edges) | ({(j, i) for i, j in edges} if both else set())


@thorough
@given(generated())
def test_every_graph_is_connected_without_self_loops_and_the_same_again(swarm: Topology) -> None:
    graph = build(swarm)
    assert list(graph.nodes) == list(range(swarm.swarm.peers))
    assert nx.number_of_selfloops(graph) == 0
    assert is_connected(graph) and min(dict(graph.degree).values()) > 0
    assert dict(build(swarm).edges) == dict(graph.edges)
    if not swarm.directed:
        assert all(graph.has_edge(j, i) for i, j in graph.edges)


@thorough
@given(generated())
def test_mixing_keeps_the_mean_and_undirected_graphs_mix_both_ways_alike(swarm: Topology) -> None:
    matrix = mixing_matrix(build(swarm))
    assert (matrix >= 0).all() and (np.diag(matrix) > 0).all()
    np.testing.assert_allclose(matrix.sum(axis=1), 1, atol=1e-12)
    # Doubly stochastic: all kinds are, the exponential graph because every peer has as many senders as receivers.
    np.testing.assert_allclose(matrix.sum(axis=0), 1, atol=1e-12)
    if not swarm.directed:
        assert (matrix == matrix.T).all()
    assert 0 < spectral_gap(matrix) <= 1 + 1e-12


@pytest.mark.parametrize(
    ("graph", "peers", "edges"),
    [
        ({"kind": "complete"}, 4, pairs([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)])),
        ({"kind": "ring"}, 4, pairs([(0, 1), (1, 2), (2, 3), (3, 0)])),
        ({"kind": "ring"}, 2, pairs([(0, 1)])),
        ({"kind": "line"}, 4, pairs([(0, 1), (1, 2), (2, 3)])),
        ({"kind": "star"}, 4, pairs([(0, 1), (0, 2), (0, 3)])),
        ({"kind": "tree"}, 6, pairs([(0, 1), (0, 2), (1, 3), (1, 4), (2, 5)])),
        ({"kind": "tree", "branching": 3}, 5, pairs([(0, 1), (0, 2), (0, 3), (1, 4)])),
        ({"kind": "small-world", "rewire": 0.0}, 6, pairs([(i, (i + k) % 6) for i in range(6) for k in (1, 2)])),
        ({"kind": "exponential"}, 6, pairs([(i, (i + k) % 6) for i in range(6) for k in (1, 2, 4)], both=False)),
        ({"kind": "exponential"}, 4, pairs([(i, (i + k) % 4) for i in range(4) for k in (1, 2)], both=False)),
        ({"kind": "exponential"}, 5, pairs([(i, (i + k) % 5) for i in range(5) for k in (1, 2, 4)], both=False)),
        ({"kind": "exponential"}, 2, pairs([(0, 1)])),
    ],
)
def test_what_the_kinds_look_like(graph: dict[str, Any], peers: int, edges: Pairs) -> None:
    assert set(build(topology(peers, **graph)).edges) == edges


@pytest.mark.parametrize("peers", range(2, 13))
def test_k_regular_exists_for_every_degree_that_is_possible(peers: int) -> None:
    for degree in range(1, peers + 2):
        swarm = topology(peers, kind="k-regular", degree=degree)
        if min(2, peers - 1) <= degree < peers and peers * degree % 2 == 0:
            assert {count for _, count in build(swarm).in_degree} == {degree}
        else:
            with pytest.raises(TopologyError, match=r"^graph\.degree"):
                build(swarm)


def test_a_hundred_peers_with_nearly_all_the_others() -> None:
    assert {count for _, count in build(topology(100, kind="k-regular", degree=98)).out_degree} == {98}


@pytest.mark.parametrize("kind", ["k-regular", "small-world", "erdos-renyi"])
def test_another_seed_is_another_graph(kind: str) -> None:
    drawn = {frozenset(build(topology(20, seed, kind=kind)).edges) for seed in range(5)}
    assert len(drawn) == 5


def test_the_graph_does_not_depend_on_the_process() -> None:
    code = (
        "from topology import Topology, graphs\n"
        "for kind in ('k-regular', 'small-world', 'erdos-renyi'):\n"
        "    print(sorted(graphs.build(Topology.model_validate({'graph': {'kind': kind}})).edges))\n"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, cwd=Path(__file__).parents[2],
            capture_output=True, text=True, check=True, timeout=60,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    here = "".join(f"{sorted(build(topology(10, kind=kind)).edges)}\n" for kind in CONNECTED[5:8])
    assert printed == {here}


def test_metropolis_hastings_weights_of_a_star() -> None:
    matrix = mixing_matrix(build(topology(4, kind="star")))
    quarter, rest = 0.25, 0.75
    assert matrix.tolist() == [
        [quarter] * 4, [quarter, rest, 0, 0], [quarter, 0, rest, 0], [quarter, 0, 0, rest],
    ]  # fmt: skip


def test_edges_go_both_ways_unless_directed() -> None:
    listed = [{"from": 0, "to": 1}, {"from": 1, "to": 2}, {"from": 2, "to": 0}, {"from": 2, "to": 1}]
    one_way = build(topology(3, edges=listed, kind="edges", directed=True))
    assert set(one_way.edges) == {(0, 1), (1, 2), (2, 0), (2, 1)}
    assert is_connected(one_way)
    # Nothing says the graph is balanced, so each peer gives itself and its senders the same.
    expected = [[0.5, 0, 0.5], [1 / 3, 1 / 3, 1 / 3], [0, 0.5, 0.5]]
    np.testing.assert_allclose(mixing_matrix(one_way), expected, atol=1e-15)
    both = build(topology(3, edges=listed[:3], kind="edges"))
    assert set(both.edges) == pairs([(0, 1), (1, 2), (2, 0)])


def test_connected_means_along_the_arrows() -> None:
    listed = [{"from": 0, "to": 1}, {"from": 1, "to": 2}]
    assert is_connected(build(topology(3, edges=listed, kind="edges")))
    assert not is_connected(build(topology(3, edges=listed, kind="edges", directed=True)))


def test_weights_are_what_the_receiver_gives_the_sender() -> None:
    listed: list[dict[str, float]] = [
        {"from": 0, "to": 1, "weight": 0.75},
        {"from": 1, "to": 0},
        {"from": 1, "to": 2},
        {"from": 2, "to": 0},
    ]
    graph = build(topology(3, edges=listed, kind="edges", directed=True))
    assert graph.edges[0, 1]["weight"] == 0.75
    expected = [[1 / 3, 1 / 3, 1 / 3], [0.75, 0.25, 0], [0, 0.5, 0.5]]
    np.testing.assert_allclose(mixing_matrix(graph), expected, atol=1e-15)


def test_weights_for_the_edges_of_another_kind() -> None:
    listed = [{"from": 0, "to": 1, "weight": 0.25}, {"from": 2, "to": 1, "weight": 0.75}]
    matrix = mixing_matrix(build(topology(3, edges=listed, kind="line")))
    assert matrix.tolist() == [[0.75, 0.25, 0], [0.25, 0, 0.75], [0, 0.75, 0.25]]


def test_weights_that_add_up_to_one_but_for_rounding() -> None:
    shares = [0.2, 0.7, 0.1 + 1e-16]
    listed = [{"from": i + 1, "to": 0, "weight": share} for i, share in enumerate(shares)]
    matrix = mixing_matrix(build(topology(4, edges=listed, kind="edges", directed=True)))
    assert matrix[0, 0] == pytest.approx(0, abs=1e-12) and matrix[0, 0] >= 0


def test_spectral_gaps_known_from_theory() -> None:
    assert spectral_gap(mixing_matrix(build(topology(8, kind="complete")))) == pytest.approx(1)
    ring = 1 - (1 + 2 * np.cos(2 * np.pi / 8)) / 3
    assert spectral_gap(mixing_matrix(build(topology(8, kind="ring")))) == pytest.approx(ring)
    # The gap of the exponential graph is 2 / (1 + log2(N)) for N even.
    assert spectral_gap(mixing_matrix(build(topology(8, kind="exponential")))) == pytest.approx(0.5)
    apart = [{"from": 0, "to": 1}, {"from": 2, "to": 3}]
    graph = build(topology(4, edges=apart, kind="edges"))
    assert not is_connected(graph) and spectral_gap(mixing_matrix(graph)) == pytest.approx(0)


@pytest.mark.parametrize("directed", [False, True])
def test_edge_lists_that_networkx_writes(load_text: LoadText, tmp_path: Path, directed: bool) -> None:
    original = nx.gnp_random_graph(9, 0.5, seed=2, directed=directed)
    text = f"[swarm]\npeers = 9\n[graph]\nkind = 'file'\npath = 'edges.txt'\ndirected = {str(directed).lower()}"
    nx.write_edgelist(original, tmp_path / "edges.txt")
    assert set(build(load_text(text)).edges) == set(original.to_directed().edges)
    nx.write_edgelist(original, tmp_path / "edges.txt", data=False)
    assert set(build(load_text(text)).edges) == set(original.to_directed().edges)
    for number, (i, j) in enumerate(original.edges):
        original.edges[i, j]["weight"] = 0.01 * (1 + number % 9)
        original.edges[i, j]["color"] = "red"
    for write in (nx.write_edgelist, nx.write_weighted_edgelist):
        write(original, tmp_path / "edges.txt")
        graph = build(load_text(text))
        assert {(i, j): graph.edges[i, j]["weight"] for i, j in graph.edges} == {
            (i, j): original.edges[i, j]["weight"] for i, j in original.to_directed().edges
        }


def test_an_edge_list_with_comments_and_empty_lines(load_text: LoadText, tmp_path: Path) -> None:
    (tmp_path / "edges.txt").write_text("# peers\n\n0 1  # first\n  1\t2\n")
    graph = build(load_text("[swarm]\npeers = 3\n[graph]\nkind = 'file'\npath = 'edges.txt'"))
    assert set(graph.edges) == pairs([(0, 1), (1, 2)])
