"""Every method, graph, participation and wire type, each through a whole swarm of its own."""

import json
import re
import socket

import pytest

import topology
from peer.methods.registry import METHODS, find
from peer.methods.weighting import WEIGHTINGS
from topology import graphs

PEER_TO_PEER = [name for name in METHODS if not find(name).coordinated and name not in ("ssl", "zeroshot")]
"""Those that a file without coordinator, public samples or CLIP can name; the others have files of their own."""


@pytest.fixture(scope="module")
def check(command, tmp_path_factory):
    """The plan of a topology file with changes, as `swarm check --json` prints it."""
    cwd = tmp_path_factory.mktemp("check")

    def check(file, *changes):
        overrides = [word for change in changes for word in ("--set", change)]
        status, said, attempts = command("check", file, "--json", *overrides, cwd=cwd)
        assert status == 0, (changes, said)
        assert attempts == []
        return json.loads(said)

    return check


def check_complete(ended, check):
    """What holds for every undisturbed run, whatever it runs. Returns its plan."""
    assert ended.status == 0, ended.output
    summary = ended.summary
    plan = check(ended.folder / "topology.toml")
    assert summary["bytes"]["payload_by_round"] == plan["payload_bytes_by_round"]
    assert summary["bytes"]["disagreements"] == []
    assert summary["connections"]["mismatched"] == []
    assert summary["connections"]["verified"] == len(ended.events("connection"))
    described = topology.load(ended.folder / "topology.toml")
    graph = graphs.build(described)
    for event in ended.events("round"):
        assert event["missing"] == []
        chosen = set(described.participants(event["round"]))
        expected = sorted(set(graph.predecessors(event["peer"])) & chosen) if event["peer"] in chosen else []
        assert event["present"] == (expected if plan["payload_bytes_total"] else [])
    return plan


def test_the_snapshots_that_uniform_teaches_from_are_the_states_its_peers_were_in(run, check):
    ended = run(swarm={"peers": 3, "rounds": 3}, method={"name": "uniform"})
    check_complete(ended, check)
    states = ended.snapshots()
    later = [event for event in ended.events("delivered") if event["round"] > 1]
    assert len(later) == 2 * 6
    for event in later:
        assert event["digest"] == states[event["sender"], event["round"] - 1]


def test_agreement_on_a_star_with_a_chosen_address(run, check):
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        port = probe.getsockname()[1]
    ended = run(
        method={"name": "agreement"}, graph={"kind": "star"}, peer=[{"id": 1, "host": "127.0.0.2", "port": port}]
    )
    check_complete(ended, check)
    assert ended.events("started", 1)[0]["endpoint"] == f"tcp://127.0.0.2:{port}"
    assert topology.load(ended.folder / "topology.toml").method.options["weighting"] == "uniform"


def test_uncertainty_on_a_directed_graph_in_bfloat16(run, check):
    ended = run(
        swarm={"peers": 5},
        method={"name": "uncertainty"},
        graph={"kind": "exponential"},
        transport={"dtype": "bfloat16"},
        models={"pool": [{"name": "cnn3", "width": 4}, {"name": "mlp", "hidden": [16]}]},
    )
    plan = check_complete(ended, check)
    assert plan["edges"] == 15
    assert [peer["sends_to"] for peer in plan["plan"]][:2] == [[1, 2, 4], [0, 2, 3]]


def test_dpsgd_with_edges_and_weights_of_ones_own(run, check):
    edges = [(0, 1, 0.5), (1, 2, 0.25), (2, 0, 0.75), (2, 1, 0.25), (3, 0, 0.25), (0, 3, 1.0)]
    ended = run(
        swarm={"rounds": 3},
        method={"name": "dpsgd"},
        graph={"kind": "edges", "directed": True},
        edge=[{"from": i, "to": j, "weight": weight} for i, j, weight in edges],
    )
    plan = check_complete(ended, check)
    parameters = 64 * 32 + 32 + 32 * 10 + 10
    assert plan["payload_bytes_per_round"] == len(edges) * 4 * parameters
    # Peer 3 gives all its weight to peer 0, so after a round it is what peer 0 sent.
    sent = {event["round"]: event["digest"] for event in ended.events("delivered", 3)}
    assert sent == {event["round"]: event["snapshot"] for event in ended.events("round", 3)}
    assert len(sent) == 3


def test_local_training_sends_nothing_and_quiet_says_little(run, check):
    ended = run("--quiet", method={"name": "local"}, swarm={"peers": 3})
    check_complete(ended, check)
    assert re.fullmatch(r"complete\. .*\n.*report\.html\n", ended.output)
    assert ended.summary["bytes"]["payload"] == 0
    assert ended.events("delivered") == []


@pytest.fixture(scope="module")
def drawn(run):
    return run(swarm={"peers": 5, "rounds": 5, "participants": 3}, method={"name": "crad"})


def test_the_peers_drawn_for_a_round_take_part_in_it(drawn, check):
    check_complete(drawn, check)
    described = topology.load(drawn.folder / "topology.toml")
    took_part = {
        round: tuple(
            event["peer"] for event in drawn.events("round") if event["round"] == round and event["participates"]
        )
        for round in range(1, 6)
    }
    assert took_part == {round: described.participants(round) for round in range(1, 6)}
    assert len(set(took_part.values())) > 1
    assert {len(peers) for peers in took_part.values()} == {3}


def test_the_others_keep_their_weights(drawn):
    states = drawn.snapshots()
    later = [event for event in drawn.events("round") if event["round"] > 1]
    for event in later:
        before = states[event["peer"], event["round"] - 1]
        assert (event["snapshot"] != before) == event["participates"]
        assert (event["loss"] is not None) == event["participates"]
    assert not all(event["participates"] for event in later)


@pytest.mark.parametrize("rule", WEIGHTINGS)
def test_every_weight_rule_can_be_chosen(reference, check, rule):
    assert check(reference.file, f"method.weighting={rule}")["payload_bytes_per_round"] > 0


@pytest.mark.parametrize("name", PEER_TO_PEER)
def test_every_method_foretells_its_bytes(reference, check, name):
    parameters = 64 * 256 + 256 + 256 * 128 + 128 + 128 * 10 + 10
    statistics = {"crad": 2 * 4 * 10, "agreement": 2 * 4 * 10}
    sizes = {bits: 0 if name == "local" else bits // 8 * parameters + statistics.get(name, 0) for bits in (32, 16)}
    for dtype, size in (("float32", sizes[32]), ("bfloat16", sizes[16]), ("float16", sizes[16])):
        plan = check(reference.file, "models.pool=['mlp']", f"method.name={name}", f"transport.dtype={dtype}")
        assert plan["payload_bytes_per_round"] == 12 * size


@pytest.mark.parametrize(
    ("kind", "edges"),
    [("complete", 30), ("ring", 12), ("line", 10), ("star", 10), ("tree", 10), ("k-regular", 24), ("small-world", 24),
     ("erdos-renyi", None), ("exponential", 18)],
)  # fmt: skip
def test_every_kind_of_graph_is_planned(reference, check, kind, edges):
    plan = check(reference.file, "swarm.peers=6", f"graph.kind={kind}")
    assert plan["connected"] is True
    assert plan["edges"] == sum(len(peer["sends_to"]) for peer in plan["plan"])
    assert edges in (None, plan["edges"])
    assert 0 < plan["spectral_gap"] <= 1
