"""Peers that say what is not so: the lie is told and logged, and what nobody can use is refused by name."""

import json

import pytest


def lie(peer, mode, rounds="2-", **keys):
    return {"id": f"{mode}-{peer}", "kind": "byzantine", "peer": peer, "mode": mode, "rounds": rounds} | keys


@pytest.fixture(scope="module")
def crad(run):
    return run(
        swarm={"peers": 6, "rounds": 3},
        method={"name": "breaking:OneBoasts"},
        fault=[
            lie(0, "nan", "2"),
            lie(2, "scale", factor=4.0),
            lie(3, "stale"),
            lie(4, "lying_statistics", samples=5000),
            lie(5, "label_flip"),
        ],
    )


def test_every_lie_is_logged_once_a_round(crad):
    assert crad.status == 3, crad.output
    lines = [json.loads(line) for line in (crad.folder / "faults.jsonl").read_text().splitlines()]
    told = sorted((line["peer"], line["mode"], line["round"]) for line in lines)
    modes = {2: "scale", 3: "stale", 4: "lying_statistics", 5: "label_flip"}
    assert told == [(0, "nan", 2)] + [(peer, mode, round) for peer, mode in modes.items() for round in (2, 3)]
    assert all(line["exact"] and line["rule"] == f"{line['mode']}-{line['peer']}" for line in lines)
    assert crad.summary["faults"] == {"nan-0": 1} | {f"{mode}-{peer}": 2 for peer, mode in modes.items()}


def test_what_nobody_can_use_is_refused_by_everybody_and_named(crad):
    reasons = {(event["round"], event["peer"], event["sender"]): event["reason"] for event in crad.events("missing")}
    expected = {(2, peer, 0): "its weights are not finite" for peer in range(6) if peer != 0}
    expected |= {
        (round, peer, 1): "its statistics are no counts and fractions"
        for round in (2, 3) for peer in range(6) if peer != 1
    }  # fmt: skip
    assert reasons == expected
    assert crad.summary["missing"] == [list(key) for key in sorted(expected)]
    for event in crad.events("round"):
        gone = {sender for round, peer, sender in expected if (round, peer) == (event["round"], event["peer"])}
        assert set(event["missing"]) == gone
        assert not gone & set(event["present"])
        assert event["loss"] is not None, "a loss that is not finite is written as null"


def test_what_is_stale_was_heard_before(crad):
    heard = {(event["round"], event["sender"]): event["digest"] for event in crad.events("delivered")}
    assert heard[1, 3] == heard[2, 3] != heard[3, 3]


def test_a_liar_that_says_no_is_left_out_of_every_average(run):
    for method in ("dpsgd", "fedavg"):
        coordinated = {"graph": {"kind": "star"}, "peer": [{"id": 0, "role": "coordinator"}]}
        ended = run(
            swarm={"rounds": 2}, method={"name": method}, fault=[lie(3, "nan", "1-")],
            **(coordinated if method == "fedavg" else {}),
        )  # fmt: skip
        assert ended.status == 3, ended.output
        assert {event["reason"] for event in ended.events("missing")} == {"its weights are not finite"}
        assert {event["sender"] for event in ended.events("missing")} == {3}
        assert all(event["global_accuracy"] for event in ended.events("round") if event["peer"] == 0)


def test_a_coordinator_that_says_what_nobody_can_use_ends_the_run(run):
    ended = run(
        method={"name": "fedavg"}, graph={"kind": "star"}, peer=[{"id": 0, "role": "coordinator"}],
        fault=[lie(0, "nan")],
    )  # fmt: skip
    assert ended.status == 1, ended.output
    assert "its weights are not finite" in ended.summary["reason"]


def test_a_peer_whose_offers_are_misshapen_is_heard_no_more_and_the_others_finish(run):
    ended = run(swarm={"rounds": 4}, fault=[lie(1, "wrong_shape")])
    assert ended.status == 3, ended.output
    assert ended.summary["faults"] == {"wrong_shape-1": 3}
    missing = {(round, peer, 1) for round in (2, 3, 4) for peer in (0, 2, 3)}
    assert {tuple(one) for one in ended.summary["missing"] if one[2] == 1} == missing
    assert not [one for one in ended.summary["missing"] if 1 not in one[1:]]
    refused = [event for event in ended.events("refused") if event["source"] == 1]
    assert {event["reason"] for event in refused} >= {"its snapshot has not the layout of its model"}
    assert {event["sender"] for event in ended.events("delivered") if event["round"] > 1} >= {0, 2, 3}
    assert not [event for event in ended.events("link") if event["state"] == "banned" and event["neighbor"] != 1]


def test_one_that_floods_is_dropped_and_nobody_else_is_touched(run):
    ended = run(swarm={"rounds": 3}, fault=[lie(1, "flood", "2-3")])
    assert ended.summary["faults"] == {"flood-1": 2}
    assert not [one for one in ended.summary["missing"] if 1 not in one[1:]]
    assert not [event for event in ended.events("link") if event["state"] == "banned" and event["neighbor"] != 1]
    assert not ended.summary["connections"]["mismatched"]
