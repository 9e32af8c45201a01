"""Every mistake is said in one line that names the key, what was given and what is allowed."""

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from topology import TopologyError, graphs, load

Refusal = Callable[..., list[str]]

SWARM_KEYS = "name, peers, rounds, seed, participants, round_deadline_s"
MISTAKES = tomllib.loads(Path(__file__).with_name("mistakes.toml").read_text("utf-8"))


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_one_mistake_is_one_line(refusal: Refusal, mistake: dict[str, str]) -> None:
    assert refusal(mistake["file"]) == [mistake["refused"]]


def test_no_graph_is_taken_that_is_not_connected(refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "DRAWS", 1)
    assert refusal("[swarm]\npeers = 1000\n[graph]\nkind = 'small-world'\ndegree = 2\nrewire = 1.0") == [
        "graph.rewire = 1.0: none of 1 graphs drawn was connected; take a lower one, or a higher graph.degree"
    ]


def test_several_mistakes_are_reported_together_in_the_order_of_the_sections(refusal: Refusal) -> None:
    lines = refusal(
        """
        colour = "red"
        [graph]
        kind = "edges"
        [swarm]
        peers = 3
        rounds = 0
        round = 5
        [training]
        optimizer = "lion"
        [[peer]]
        id = 7
        [[peer]]
        id = 1
        port = 80
        [[peer]]
        id = 1
        [[edge]]
        from = 0
        to = 0
        """
    )
    starts = ["swarm.rounds = 0", "swarm.round = 5", "training.optimizer = 'lion'", "[[peer]] 1", "colour = 'red'"]
    assert [line.split(":")[0] for line in lines] == starts

    edges = "[[edge]]\nfrom = 0\nto = 0\n[[edge]]\nfrom = 0\nto = 99"
    starts = ["[[peer]] 77", "[[peer]] 1", "[[edge]] 0 -> 0", "[[edge]] 0 -> 99"]
    lines = refusal(f"[[peer]]\nid = 77\n[[peer]]\nid = 1\n[[peer]]\nid = 1\n{edges}")
    assert [line.split(": ")[0] for line in lines] == starts


@pytest.mark.parametrize(
    ("override", "fragments"),
    [
        ("swarm.peers", ["'swarm.peers'", "section.key=value", "swarm.rounds=5"]),
        ("swarm=3", ["'swarm=3'", "section.key=value"]),
        (".peers=3", ["'.peers=3'", "section.key=value"]),
        ("peer.id=3", ["'peer.id=3'", "[[peer]]", "in the file"]),
        ("swarm.peer=5", ["swarm.peer = 5", "Did you mean peers?", SWARM_KEYS]),
        ("swrm.peers=5", ["[swrm]: there is no such section. Did you mean swarm?"]),
        ("swarm.peers=many", ["swarm.peers = 'many'", "a whole number from 1 to 1000"]),
        ("swarm.peers=3\nrounds=1", ["swarm.peers = '3\\nrounds=1'", "a whole number"]),
        ("graph.kind=rng", ["graph.kind = 'rng'", "Did you mean ring?"]),
        ("models.pool=[cnn6]", ["'models.pool=[cnn6]'", "not a TOML value", "in quotes", """'models.pool=["cnn6"]'"""]),
    ],
)
def test_a_wrong_override_is_refused_like_a_wrong_key(refusal: Refusal, override: str, fragments: list[str]) -> None:
    (line,) = refusal("[swarm]\npeers = 4", override)
    assert not [fragment for fragment in fragments if fragment not in line]


def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path) -> None:
    def reason(path: Path) -> str:
        with pytest.raises(TopologyError) as caught:
            load(path)
        (line,) = str(caught.value).splitlines()
        assert line.startswith(f"{path}: ")
        return line.removeprefix(f"{path}: ")

    assert reason(tmp_path / "none.toml") == f"there is no such file (looked in {Path.cwd()})"
    assert reason(tmp_path) == "is a folder; name the topology file in it"
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[swarm]\npeers = \n")
    assert reason(wrong) == "is not valid TOML: Invalid value (at line 2, column 9)"
    wrong.write_bytes(b"\xff\xfe\x00")
    assert reason(wrong) == "is not text in UTF-8, which TOML must be"


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        ("0 1\n1 1\n1 9\n1 0", [
            "graph.path: edges.txt line 2: joins peer 1 to itself; an edge needs two different peers",
            "graph.path: edges.txt line 3: there is no peer 9; with swarm.peers = 3 they are 0 to 2",
            "graph.path: edges.txt line 4: is there already, at graph.path: edges.txt line 1; list each edge once; "
            "without graph.directed = true an edge goes both ways",
        ]),
        *(
            (f"# a comment\n0 1\n{line}", [
                f"graph.path: edges.txt line 3: {line!r} is not an edge; write two peers and, if you like, a weight "
                "above 0 and at most 1: 0 1, or 0 1 0.5, or 0 1 {'weight': 0.5}",
            ])
            for line in ("0", "1,2", "a b", "1 2 x", "1 2 0", "1 2 1.5", "1 2 nan", "1 2 True", "1 2 [0.5]",
                         "1 2 {'weight': 'x'}", "1 2 __import__('os').getpid()", "1 2 {", "1 2 0.5 0.5")
        ),
        ("0 1 0.5\n1 2", [
            "graph.path: weight: into peer 1 some edges have one, but not those from 2; give one to all edges into a "
            "peer, or to none",
        ]),
    ],
)  # fmt: skip
def test_mistakes_in_an_edge_list_are_named_by_line(
    refusal: Refusal, tmp_path: Path, content: str, lines: list[str]
) -> None:
    (tmp_path / "edges.txt").write_text(content)
    assert refusal("[swarm]\npeers = 3\n[graph]\nkind = 'file'\npath = 'edges.txt'") == lines


def test_an_edge_list_that_cannot_be_read_or_leaves_a_peer_out(refusal: Refusal, tmp_path: Path) -> None:
    text = "[swarm]\npeers = 3\n[graph]\nkind = 'file'\npath = 'edges.txt'"
    edges = tmp_path / "edges.txt"
    key = f"graph.path = {str(edges)!r}: "
    assert refusal(text) == [f"{key}there is no such file; a path is relative to the topology file"]
    edges.write_text("0 1")
    assert refusal(text) == [
        f"{key}peer 2 is isolated; each of the peers 0 to 2 needs an edge at least: add lines to the file, or lower "
        "swarm.peers"
    ]
    edges.write_bytes(b"\xff\xfe")
    assert refusal(text) == [f"{key}cannot be read: it is not UTF-8 text; it must be a text file with one edge a line"]
    edges.unlink()
    edges.mkdir()
    assert refusal(text) == [f"{key}cannot be read: Is a directory; it must be a text file with one edge a line"]
