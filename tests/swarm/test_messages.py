"""Messages lost, held, doubled, damaged and cut off on purpose: the results are those without, or some are missing."""

import json

import pytest

SWARM = {"swarm": {"peers": 3, "rounds": 4, "seed": 5}, "method": {"name": "uniform"}}
SMALL = {"piece_bytes": 4096, "retry_s": 0.1}
RULES = [
    {"id": "loses", "kind": "loss", "probability": 0.1},
    {"id": "holds", "kind": "delay", "delay_ms": 20.0, "jitter_ms": 10.0, "probability": 0.2, "rounds": "2-3"},
    {"id": "doubles", "kind": "duplicate", "messages": ["piece", "offer", "ack"], "probability": 0.2},
    {"id": "mixes", "kind": "reorder", "probability": 0.2},
    {"id": "damages", "kind": "corrupt", "probability": 0.1},
]
KEY = ("rule", "sender", "receiver", "message", "round", "sequence", "piece", "attempt")


def fired(ended):
    return [json.loads(line) for line in (ended.folder / "faults.jsonl").read_text().splitlines()]


def first_verdicts(ended):
    """On pieces, for how often an offer is repeated is a matter of time."""
    lines = [line for line in fired(ended) if line["attempt"] == 0 and line["message"] == "piece"]
    return sorted(tuple(line[name] for name in KEY) for line in lines)


def models(ended):
    return {(event["round"], event["peer"]): event["snapshot"] for event in ended.events("round")}


@pytest.fixture(scope="module")
def calm(run):
    return run(**SWARM, transport=SMALL)


@pytest.fixture(scope="module")
def stormy(run):
    return run(**SWARM, transport=SMALL, fault=RULES)


def test_a_storm_changes_no_bit_of_the_results(calm, stormy):
    assert calm.status == stormy.status == 0, stormy.output
    assert all(stormy.summary["faults"].values()), stormy.summary["faults"]
    assert models(stormy) == models(calm)
    arrived = sorted((event["round"], event["peer"], event["sender"]) for event in stormy.events("delivered"))
    assert arrived == [(r, i, j) for r in range(1, 5) for i in range(3) for j in range(3) if i != j]


def test_the_parts_of_a_held_snapshots_time_add_up(stormy):
    delivered = stormy.events("delivered")
    for event in delivered:
        parts = [event[f"{part}_ms"] for part in ("queue", "wire", "verify", "injected", "inbox")]
        assert abs(sum(parts) - event["observed_ms"]) < 1.0
        assert min(parts) > -0.01
    assert any(event["injected_ms"] > 0 for event in delivered)
    held = [line["injected_ms"] for line in fired(stormy) if line["rule"] == "holds"]
    assert held and all(20.0 <= milliseconds <= 30.0 for milliseconds in held)
    assert {line["round"] for line in fired(stormy) if line["rule"] == "holds"} == {2, 3}


def test_what_is_damaged_is_noticed_and_sent_again(stormy):
    damaged = [(event["round"], event["peer"], event["sender"], event["piece"]) for event in stormy.events("damaged")]
    bits = [line for line in fired(stormy) if line["rule"] == "damages"]
    assert set(damaged) <= {(line["round"], line["receiver"], line["sender"], line["piece"]) for line in bits}
    assert damaged


def test_the_same_file_gets_the_same_verdicts(run, stormy):
    again = run(**SWARM, transport=SMALL, fault=RULES)
    assert first_verdicts(again) == first_verdicts(stormy) != []


def test_a_replay_reads_the_verdicts_and_draws_none(run, stormy, tmp_path):
    """One is taken out of the log: drawn, it would be there again."""
    first = first_verdicts(stormy)
    gone = next(verdict for verdict in first if verdict[0] == "doubles")
    kept = [line for line in fired(stormy) if tuple(line.get(name) for name in KEY) != gone]
    (tmp_path / "topology.toml").write_bytes((stormy.folder / "topology.toml").read_bytes())
    (tmp_path / "faults.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept) + '{"torn')
    again = run("--replay", str(tmp_path), "--set", "swarm.name=again", **SWARM, transport=SMALL, fault=RULES)
    assert again.status == 0, again.output
    assert first_verdicts(again) == [verdict for verdict in first if verdict != gone]
    assert models(again) == models(stormy)


def test_what_cannot_be_replayed_is_refused(run, stormy, command, tmp_path):
    plain, changed = tmp_path / "plain", tmp_path / "changed"
    for folder in (plain, changed):
        folder.mkdir()
        (folder / "topology.toml").write_bytes((stormy.folder / "topology.toml").read_bytes())
    (changed / "faults.jsonl").write_text("no JSON\n")
    refusals = [
        (tmp_path / "nowhere", [], "does not exist"),
        (tmp_path, [], "is not a run folder"),
        (plain, [], "has no faults.jsonl"),
        (changed, [], "was changed after the run"),
        (stormy.folder, ["--set", "swarm.seed=6"], "swarm.seed = 5, this file says 6."),
        (stormy.folder, ["--set", "fault.loses.probability=0.2", "--set", "swarm.rounds=5"], "swarm.rounds = 4"),
    ]
    for folder, changes, expected in refusals:
        status, said, attempts = command(
            "run", stormy.file, *changes, "--replay", folder, "--out", tmp_path / "out", cwd=tmp_path
        )
        assert status == 2 and len(said.splitlines()) == 1, said
        assert said.startswith("--replay: ") and expected in said, said
        assert attempts == [] and not (tmp_path / "out").exists()


def test_a_partition_lets_nothing_across_and_heals(run):
    split = {"id": "split", "kind": "partition", "groups": [[0, 1], [2, 3]], "at": {"round": 3}, "until": {"round": 5}}
    ended = run(
        swarm={"peers": 4, "rounds": 8, "round_deadline_s": 5.0}, method={"name": "uniform"}, fault=[split],
        transport={"beat_s": 0.2, "suspect_s": 0.5, "dead_s": 1.0, "retry_s": 0.1},
    )  # fmt: skip
    assert ended.status == 3, ended.output
    side = {0: 0, 1: 0, 2: 1, 3: 1}
    across = {event["round"] for event in ended.events("delivered") if side[event["peer"]] != side[event["sender"]]}
    assert not across & {3, 4}
    assert {1, 2} <= across and across & {5, 6, 7, 8}
    within = [event for event in ended.events("missing") if side[event["peer"]] == side[event["sender"]]]
    assert not within
    assert {line["state"] for line in fired(ended)} == {"cut", "healed"}
    for event in ended.events("connection"):
        assert event["neighbor"] in side
    assert len(ended.events("connection")) <= 2 * 4 * 3, "it did not connect again and again"


def test_nobody_hears_one_way_and_the_run_ends(run):
    deaf = {"id": "deaf", "kind": "loss", "edges": ["1->2"], "messages": ["offer", "piece"]}
    ended = run(
        swarm={"peers": 3, "rounds": 3, "round_deadline_s": 3.0}, method={"name": "uniform"}, fault=[deaf],
        transport={"retry_s": 0.1, "retry_max_s": 0.2, "beat_s": 0.1, "attempts": 4},
    )  # fmt: skip
    assert ended.status == 3, ended.output
    assert {(receiver, sender) for _, receiver, sender in ended.summary["missing"]} == {(2, 1)}
    assert {event["receiver"] for event in ended.events("undelivered")} == {2}
