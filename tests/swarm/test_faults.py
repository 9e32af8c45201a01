"""Peers that die, break and freeze: the others finish, and the summary says who was missing where and why."""

import os
import signal
import time

import pytest

LARGE = {"models": {"pool": [{"name": "mlp", "hidden": [512, 256]}]}}
SLOW_WIRE = {"transport": {"piece_bytes": 4096, "window": 1, "concurrent": 1}}


class Killed:
    """A run whose `victim` was killed while `witness` was receiving its snapshot of `round`."""

    def __init__(self, running) -> None:
        while True:
            self.round, self.witness, self.victim = running.wait_for(lambda: find_transfer(running))
            pid = running.pid(self.victim)
            os.kill(pid, signal.SIGSTOP)
            # What had been handed over just before is in the journal by then: this is a look at something absent.
            time.sleep(0.2)
            if (self.round, self.victim) not in delivered(running, self.witness):
                break
            os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGKILL)
        self.ended = running.end()


def delivered(running, peer):
    return {(event["round"], event["sender"]) for event in running.events("delivered", peer)}


def find_transfer(running):
    """A (round, receiver, sender) that is under way: the last that the receiver lacks, and of an open round.

    A peer receives one snapshot at a time, so with all others delivered the last one is being received. The sender
    has offered it: it gathers itself in that round, which comes after sharing.
    """
    journals = {peer: delivered(running, peer) for peer in running.peers}
    for witness, got in journals.items():
        round = max((round for round, _ in got), default=0)
        lacking = [peer for peer in running.peers if peer != witness and (round, peer) not in got]
        if round >= 2 and len(lacking) == 1 and any(number == round for number, _ in journals[lacking[0]]):
            return round, witness, lacking[0]
    return None


@pytest.fixture(scope="module")
def killed(start):
    return Killed(start(swarm={"rounds": 4}, method={"name": "uniform"}, **LARGE, **SLOW_WIRE))


def test_the_others_finish_without_a_killed_peer(killed):
    ended = killed.ended
    assert ended.status == 3, ended.output
    assert ended.summary["status"] == "degraded"
    assert ended.summary["rounds_completed"] == 4
    survivors = set(range(4)) - {killed.victim}
    assert {event["peer"] for event in ended.events("finished") if event["status"] == "complete"} == survivors


def test_the_summary_names_the_killed_peer_and_the_signal(killed):
    (lost,) = killed.ended.summary["peers_lost"]
    assert lost["peer"] == killed.victim
    assert "SIGKILL" in lost["reason"]
    rounds = [event["round"] for event in killed.ended.events("round", killed.victim)]
    assert lost["last_round"] == max(rounds)
    assert f"peer {killed.victim} was killed by SIGKILL" in killed.ended.output


def test_its_partial_snapshot_was_not_delivered_but_reported_missing(killed):
    ended = killed.ended
    assert (killed.round, killed.victim) not in delivered(ended, killed.witness)
    assert [killed.round, killed.witness, killed.victim] in ended.summary["missing"]


def test_every_snapshot_was_delivered_once_or_reported_missing(killed):
    ended = killed.ended
    arrived = [(event["round"], event["peer"], event["sender"]) for event in ended.events("delivered")]
    missing = [tuple(entry) for entry in ended.summary["missing"]]
    assert missing == sorted((event["round"], event["peer"], event["sender"]) for event in ended.events("missing"))
    assert {sender for _, _, sender in missing} == {killed.victim}
    survivors = set(range(4)) - {killed.victim}
    expected = [(round, receiver, sender) for round in range(1, 5) for receiver in survivors
                for sender in range(4) if sender != receiver]  # fmt: skip
    assert sorted([entry for entry in arrived if entry[1] != killed.victim] + missing) == expected
    for receiver in survivors:
        assert (4, receiver, killed.victim) in missing
    for event in ended.events("round"):
        gone = [sender for round, receiver, sender in missing if (round, receiver) == (event["round"], event["peer"])]
        assert event["missing"] == gone


def test_what_was_delivered_is_what_was_sent(killed):
    digests = {}
    for event in killed.ended.events("delivered"):
        digests.setdefault((event["round"], event["sender"]), set()).add(event["digest"])
    assert all(len(found) == 1 for found in digests.values()), "a snapshot differs between its receivers"
    assert len(set.union(*digests.values())) == len(digests)


def test_the_bytes_of_the_killed_peer_are_not_passed_off_as_counted(killed):
    summary = killed.ended.summary
    assert summary["bytes"]["without_books"] == [killed.victim]
    assert summary["bytes"]["foretold_payload"] is None
    assert summary["bytes"]["disagreements"] == []
    assert summary["connections"]["mismatched"] == []
    assert {peer for peer, _ in summary["connections"]["unaccounted"]} == {killed.victim}


@pytest.fixture(scope="module")
def raised(run, tmp_path_factory):
    touched = tmp_path_factory.mktemp("cuda") / "touched"
    ended = run(
        environment={"CUDA_TOUCHED_BY": str(touched)},
        swarm={"rounds": 4},
        method={"name": "breaking:OneRaises"},
        devices={"assign": "auto"},
    )
    ended.touched = touched
    return ended


def test_the_others_finish_without_a_peer_that_raised(raised):
    assert raised.status == 3, raised.output
    assert raised.summary["status"] == "degraded"
    assert {event["peer"] for event in raised.events("finished") if event["status"] == "complete"} == {0, 2, 3}
    assert raised.summary["missing"] == [[round, peer, 1] for round in (2, 3, 4) for peer in (0, 2, 3)]
    (lost,) = raised.summary["peers_lost"]
    assert (lost["peer"], lost["last_round"]) == (1, 1)
    assert lost["reason"].startswith("RuntimeError: peer 1 raises in round 2")


def test_its_traceback_is_shown_at_once_and_kept(raised):
    message = "RuntimeError: peer 1 raises in round 2, as it was told to, in a line that is longer than a terminal\n"
    shown = raised.output
    assert shown.index("peer 1 failed") < shown.index("Traceback") < shown.index("round   4/4")
    assert "breaking.py" in shown
    assert message in shown
    assert message in (raised.folder / "peers/1/log.txt").read_text()
    (error,) = raised.events("error")
    assert error["peer"] == 1
    assert message in error["traceback"]
    assert [event["status"] for event in raised.events("finished", 1)] == ["failed"]


def test_cuda_is_for_the_peers_to_initialize(raised):
    """A peer on the CPU does not, and one on a device finds CUDA as if nothing had been forked."""
    on_cuda = {event["pid"]: event["device"] != "cpu" for event in raised.events("started")}
    touched = {int(line) for line in raised.touched.read_text().splitlines()} if raised.touched.exists() else set()
    assert touched == {pid for pid, cuda in on_cuda.items() if cuda}, "supervisor and fork server must not"
    uses = list(on_cuda.values())
    for event in raised.events("round"):
        assert event["method"]["cuda_initialized"] == float(uses[event["peer"]])
        assert not (uses[event["peer"]] and event["method"]["bad_fork"])


def test_a_run_that_loses_every_peer_failed_and_says_so_although_quiet(run):
    ended = run("--quiet", method={"name": "breaking:AllRaise"})
    assert ended.status == 1, ended.output
    assert ended.summary["status"] == "failed"
    assert "every peer" in ended.summary["reason"]
    assert [lost["peer"] for lost in ended.summary["peers_lost"]] == [0, 1, 2, 3]
    assert ended.summary["global_accuracy"] is None
    for peer in range(4):
        assert f"ArithmeticError: peer {peer} raises in round 1" in ended.output


def test_a_peer_that_crashes_is_shown_with_the_place_where_it_did(run):
    ended = run(method={"name": "breaking:OneCrashes"})
    assert ended.status == 3, ended.output
    (lost,) = ended.summary["peers_lost"]
    assert (lost["peer"], lost["last_round"]) == (1, 1)
    assert "SIGABRT" in lost["reason"]
    assert "in round 1" not in lost["reason"], "it was in round 2"
    assert "breaking.py" in ended.output


def test_a_frozen_peer_keeps_nobody_waiting_for_ever(start):
    limits = {"beat_s": 0.5, "suspect_s": 1.5, "dead_s": 3.0}
    running = start(swarm={"rounds": 4}, method={"name": "dpsgd"}, transport=limits)
    pid = running.wait_for(lambda: running.events("round", 2) and running.pid(2))
    os.kill(pid, signal.SIGSTOP)
    ended = running.end()
    assert ended.status == 3, ended.output
    (lost,) = ended.summary["peers_lost"]
    assert lost["peer"] == 2
    assert "silent" in lost["reason"]
    states = [event["state"] for event in ended.events("link", 0) if event["neighbor"] == 2]
    assert states.index("suspect") < states.index("dead")
    assert {event["status"] for event in ended.events("finished")} == {"complete"}
    assert {sender for _, _, sender in ended.summary["missing"]} == {2}
