"""Peers that die, stand still or read slowly where the plan says so, and what that costs the others."""

import json

import pytest


def fired(ended):
    return [json.loads(line) for line in (ended.folder / "faults.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(run):
    return run(swarm={"rounds": 3})


def test_a_peer_dies_where_the_plan_says_and_the_others_finish(run):
    crash = {"id": "dies", "kind": "crash", "peer": 2, "at": {"round": 2, "phase": "begin"}}
    ended = run(swarm={"rounds": 3}, fault=[crash])
    assert ended.status == 3, ended.output
    (line,) = fired(ended)
    assert (line["rule"], line["peer"], line["round"], line["phase"], line["exact"]) == ("dies", 2, 2, "begin", True)
    (lost,) = ended.summary["peers_lost"]
    assert (lost["peer"], lost["last_round"]) == (2, 1) and "SIGKILL" in lost["reason"]
    assert [event["round"] for event in ended.events("round", 2)] == [1]
    missing = {tuple(one) for one in ended.summary["missing"]}
    assert missing == {(round, peer, 2) for round in (2, 3) for peer in (0, 1, 3)}
    assert ended.summary["rounds_completed"] == 3


def test_a_peer_that_stands_still_is_waited_for_and_one_that_reads_slowly_loses_nothing(run, whole):
    stall = {"id": "stands", "kind": "stall", "peer": 1, "at": {"round": 2, "phase": "train"}, "for_s": 1.5}
    slow = {"id": "reads", "kind": "slow_reader", "peer": 3, "rounds": "3", "delay_ms": 300.0}
    ended = run(swarm={"rounds": 3}, transport={"suspect_s": 1.1, "dead_s": 20.0}, fault=[stall, slow])
    assert ended.status == 0, ended.output
    assert [(one["rule"], one["round"]) for one in fired(ended)] == [("stands", 2)] + 3 * [("reads", 3)]
    assert ended.summary["faults"] == {"stands": 1, "reads": 3}
    seconds = {(event["peer"], event["round"]): event["seconds"] for event in ended.events("round")}
    assert seconds[1, 2]["total"] > 1.5 and seconds[3, 3]["total"] > 0.9
    assert not [event for event in ended.events("link") if event["neighbor"] == 1 and event["state"] == "dead"]
    digests = [{(e["peer"], e["round"]): e["snapshot"] for e in one.events("round")} for one in (whole, ended)]
    assert digests[0] == digests[1]
