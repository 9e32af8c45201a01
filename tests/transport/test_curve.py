"""With keys only the members get in, each under its own name, and the books still agree with the kernel."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from transport.keys import Keys, make_keys, read_keys
from transport.messages import PROTOCOL_VERSION, Beat, Envelope, Leave, encode
from transport.transfers import Missing
from transport.zap import Gate

TRIANGLE = {(i, j) for i in range(3) for j in range(3) if i != j}
SHORT = {"beat_s": 0.05, "suspect_s": 0.3, "dead_s": 1.0, "disconnected_s": 0.5}


@pytest.fixture
def keys(tmp_path: Path) -> dict[int, Keys]:
    make_keys(tmp_path / "keys", range(3))
    return {peer: read_keys(tmp_path / "keys", peer) for peer in range(3)}


def said(source: int, run: bytes) -> bytes:
    return encode(Envelope(PROTOCOL_VERSION, run, source, 0, Beat(1, 1, 0.0)))


def connect(nodes: Any, routing_id: bytes, pair: tuple[bytes, bytes] | None, server: bytes) -> "zmq.Socket[bytes]":
    """A connection to peer 0 with whatever key."""
    opened: zmq.Socket[bytes] = nodes.socket(zmq.DEALER)
    opened.setsockopt(zmq.ROUTING_ID, routing_id)
    if pair is not None:
        opened.setsockopt(zmq.CURVE_PUBLICKEY, pair[0])
        opened.setsockopt(zmq.CURVE_SECRETKEY, pair[1])
        opened.setsockopt(zmq.CURVE_SERVERKEY, server)
    opened.connect(nodes.endpoints[0])
    return opened


def test_encrypted_books_agree_with_the_kernel_to_the_byte(nodes: Any, keys: dict[int, Keys]) -> None:
    nodes.start(TRIANGLE, keys=keys)
    for round in (1, 2):
        arrivals = nodes.exchange(round, 0, 1, 2)
        assert arrivals[0] == [(1, round), (2, round)]
    for connections in nodes.settle().values():
        assert len(connections) == 4 and all(one["verified"] is True for one in connections)
    assert not [line for journal in nodes.journals.values() for line in journal.of("refused")]


@pytest.mark.parametrize("known", [True, False])
def test_who_has_no_members_key_is_not_heard(nodes: Any, keys: dict[int, Keys], known: bool) -> None:
    """Neither with a key of its own, nor without one: no message of it reaches the peer."""
    nodes.start(TRIANGLE, keys=keys, strangers=frozenset({2}))
    stranger = connect(nodes, b"2.0", zmq.curve_keypair() if known else None, keys[0].public[0])
    stranger.send(said(2, nodes.RUN))
    refused = nodes.journals[0].wait_for("refused")
    assert refused["reason"] == ("its key is no member's" if known else "its connection ended before a message said "
                                 "whose it is")  # fmt: skip
    assert nodes.exchange(1, 0, 1) == {0: [(1, 1)], 1: [(0, 1)]}
    assert nodes.state(0, lambda loop: loop.protocol.neighbors[2].incarnation) == -1


def test_a_member_that_takes_anothers_name_is_banned(
    nodes: Any, keys: dict[int, Keys], wait_until: Callable[..., None]
) -> None:
    """It is cut off, so that the name is free for its owner, and its key opens nothing any more."""
    nodes.start(TRIANGLE, keys=keys, strangers=frozenset({1}))
    assert nodes.exchange(1, 0, 2) == {0: [(2, 1)], 2: [(0, 1)]}
    liar = connect(nodes, b"1.0", (keys[2].public[2], keys[2].secret), keys[0].public[0])
    liar.send(encode(Envelope(PROTOCOL_VERSION, nodes.RUN, 1, 0, Leave())))
    nodes.journals[0].wait_for("refused", "the key of peer 2 speaks as peer 1")
    nodes.journals[0].wait_for("refused", "its key is no member's")
    owner = connect(nodes, b"1.0", (keys[1].public[1], keys[1].secret), keys[0].public[0])
    owner.send(said(1, nodes.RUN))
    wait_until(lambda: nodes.state(0, lambda loop: loop.protocol.neighbors[1].incarnation) == 0)
    assert nodes.exchange(2, 0, 2) == {0: [(2, 2)], 2: [(0, 2)]}  # what was open stays open


def test_who_is_not_who_it_should_be_is_named_and_given_up(nodes: Any, keys: dict[int, Keys]) -> None:
    """Peer 1's key is not the one that peer 0 was told: a man in the middle, or swapped files."""
    other = {**keys[0].public, 1: zmq.curve_keypair()[0]}
    nodes.start(TRIANGLE, keys=keys | {0: Keys(0, keys[0].secret, other)}, **SHORT)
    refused = nodes.journals[0].wait_for("refused", "handshake failed")
    assert refused["source"] == 1
    nodes.nodes[0].enter(1)
    (missing,) = nodes.gather(0, 1)
    assert isinstance(missing, Missing) and "dead" in missing.reason
    assert nodes.exchange(2, 0, 2) == {0: [(2, 2)], 2: [(0, 2)]}


def test_a_peer_that_would_let_anybody_in_does_not_start(
    nodes: Any, keys: dict[int, Keys], monkeypatch: pytest.MonkeyPatch
) -> None:
    def guard(gate: Gate, router: "zmq.Socket[bytes]") -> None:
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, keys[0].secret)

    monkeypatch.setattr(Gate, "guard", guard)
    monkeypatch.setattr(Gate, "__init__", _unbound)
    with pytest.raises(Exception, match="a stranger's key was let in"):
        nodes.start({(0, 1)}, keys=keys)


def _unbound(gate: Any, keys: Keys, handler: Any) -> None:
    """A gate that nobody asks."""
    gate._keys, gate._owners, gate.handler = keys, {}, handler
    handler.bind("inproc://elsewhere")


def test_key_files_are_their_owners(tmp_path: Path, keys: dict[int, Keys]) -> None:
    folder = tmp_path / "keys"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert keys[1].secret.decode() not in repr(keys[1])
    (folder / "1.secret").chmod(0o640)
    with pytest.raises(ValueError, match=r"1\.secret: others than its owner may read it"):
        read_keys(folder, 1)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda folder: (folder / "1.secret").write_bytes(b"short"), "a key of 5 characters"),
        (lambda folder: (folder / "1.secret").write_bytes((folder / "2.secret").read_bytes()), "does not belong"),
    ],
)
def test_a_key_that_is_not_this_peers_is_refused(
    tmp_path: Path, keys: dict[int, Keys], spoil: Callable[[Path], object], why: str
) -> None:
    spoil(tmp_path / "keys")
    with pytest.raises(ValueError, match=why):
        read_keys(tmp_path / "keys", 1)
    assert read_keys(tmp_path / "keys", 0) == keys[0]


def test_libzmq_is_one_without_known_holes() -> None:
    """CVE-2019-6250 and CVE-2019-13132, the latter in the CURVE handshake, were mended before this one."""
    assert zmq.zmq_version_info() >= (4, 3, 5) and zmq.has("curve")
