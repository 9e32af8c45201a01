"""A whole run: what it leaves, what it counted, and that it is the same to the bit every time."""

import json
import os
import re
import signal
import time
import tomllib

import pytest

import topology

SUMMARY_KEYS = {
    *("schema", "name", "method", "dataset", "peers", "rounds", "seed", "status", "selected_round", "missing"),
    *("global_accuracy", "local_accuracy", "global_accuracy_by_round", "wall_s", "startup_s", "bytes", "latency_ms"),
    *("peak_rss_mb", "faults", "versions"),
}  # fmt: skip


def test_a_complete_run_says_so(reference):
    assert reference.status == 0, reference.output
    assert reference.summary["status"] == "complete"
    assert reference.summary["reason"] == ""
    assert reference.summary["missing"] == []
    assert reference.summary["peers_lost"] == []
    assert "complete. global accuracy" in reference.output
    assert "Traceback" not in reference.output


def test_every_round_has_a_line_where_there_is_no_terminal(reference):
    assert re.findall(r"round +(\d+)/8 ", reference.output) == [str(round) for round in range(1, 9)]


def test_the_summary_has_every_key_of_the_contract(reference):
    summary = reference.summary
    assert summary.keys() >= SUMMARY_KEYS
    facts = {key: summary[key] for key in ("name", "method", "dataset", "peers", "rounds", "seed")}
    expected = {"name": "small", "method": "crad", "dataset": "digits", "peers": 4, "rounds": 8, "seed": 1}
    assert facts == expected
    assert isinstance(summary["schema"], int)
    assert {"payload", "stream", "retransmitted"} <= summary["bytes"].keys()
    assert 0 < summary["latency_ms"]["p50"] <= summary["latency_ms"]["p95"] <= summary["latency_ms"]["p99"]
    assert 0 < summary["startup_s"] < summary["wall_s"]
    assert {"python", "torch", "pyzmq"} <= summary["versions"].keys()


def test_the_reported_accuracies_are_means_at_the_round_of_the_best_validation(reference):
    rounds = reference.events("round")

    def mean(round, key):
        return sum(event[key] for event in rounds if event["round"] == round) / 4

    best = max(range(1, 9), key=lambda round: (mean(round, "validation_accuracy"), -round))
    summary = reference.summary
    assert summary["selected_round"] == best
    assert summary["global_accuracy"] == pytest.approx(mean(best, "global_accuracy"))
    assert summary["local_accuracy"] == pytest.approx(mean(best, "local_accuracy"))
    assert len(summary["global_accuracy_by_round"]) == 8
    assert summary["global_accuracy_by_round"][-1] > 0.2, "nothing was learnt"


def test_the_run_folder_has_what_its_contract_says(reference):
    peers = [f"peers/{peer}/{name}" for peer in range(4) for name in (
        "events.jsonl", "log.txt", "checkpoint.safetensors", "checkpoint.json")]  # fmt: skip
    for name in ("topology.toml", "summary.json", "report.html", "figures/accuracy.png", *peers):
        assert (reference.folder / name).is_file(), name
    for peer in range(4):
        events = (reference.folder / f"peers/{peer}/events.jsonl").read_text().splitlines()
        assert json.loads(events[0])["event"] == "started"
        assert json.loads((reference.folder / f"peers/{peer}/checkpoint.json").read_text())["round"] == 8
        assert (reference.folder / f"peers/{peer}/log.txt").read_text() == ""


def test_the_copy_of_the_file_has_every_default_written_out(reference):
    copy = topology.load(reference.folder / "topology.toml")
    assert copy.method.options["temperature"] == 3.0
    assert copy.devices.assign == ["cpu"] or copy.devices.assign[0].startswith("cuda")
    for section in (copy.swarm, copy.data, copy.training, copy.transport):
        assert section.model_fields_set == set(type(section).model_fields)


def test_payload_is_what_was_foretold_to_the_byte(reference, swarm):
    checked = swarm("check", reference.file, "--json")
    assert checked.returncode == 0, checked.stderr
    plan = json.loads(checked.stdout)
    assert {"peers", "edges", "payload_bytes_per_round", "connected", "spectral_gap", "predicted_memory_mb"} <= {*plan}
    assert (plan["peers"], plan["edges"], plan["connected"]) == (4, 12, True)
    assert plan["payload_bytes_per_round"] > 0
    bytes_ = reference.summary["bytes"]
    assert bytes_["payload_by_round"] == [plan["payload_bytes_per_round"]] * 8
    assert bytes_["payload"] == bytes_["foretold_payload"] == 8 * plan["payload_bytes_per_round"]
    assert sum(event["payload"] for event in reference.events("delivered")) == bytes_["payload"]


def test_what_senders_booked_is_what_receivers_got(reference):
    assert reference.summary["bytes"]["disagreements"] == []
    assert reference.summary["bytes"]["without_books"] == []
    received = {}
    for event in reference.events("delivered"):
        edge = event["sender"], event["peer"]
        received[edge] = received.get(edge, 0) + event["payload"]
    booked = {
        (event["peer"], edge["receiver"]): edge["payload"]
        for event in reference.events("books")
        for edge in event["edges"]
    }
    assert booked == received
    assert len(booked) == 12


def test_the_stream_of_every_connection_is_what_the_kernel_counted(reference):
    connections = reference.events("connection")
    assert len(connections) == 24  # both ends of each directed edge's connection
    for end in connections:
        assert end["verified"] is True, end
        assert (end["stream_out"], end["stream_in"]) == (end["kernel_out"], end["kernel_in"])
    assert reference.summary["connections"]["verified"] == 24
    assert reference.summary["connections"]["mismatched"] == []
    assert reference.summary["connections"]["unaccounted"] == []
    bytes_ = reference.summary["bytes"]
    assert bytes_["payload"] < bytes_["stream"] <= sum(end["stream_out"] for end in connections)
    assert bytes_["retransmitted"] == 0


def test_the_five_times_of_every_message_add_up(reference):
    parts = ("queue_ms", "wire_ms", "verify_ms", "injected_ms", "inbox_ms")
    assert len(reference.events("delivered")) == 8 * 12
    for event in reference.events("delivered"):
        assert sum(event[part] for part in parts) == pytest.approx(event["observed_ms"], abs=1e-3)
        assert event["injected_ms"] == 0.0
        assert min(event[part] for part in parts) >= 0.0


def test_peers_inherit_the_data_and_the_libraries(reference):
    for event in reference.events("started"):
        assert 0 < event["own_mb"] < 60, event
    assert len({event["pid"] for event in reference.events("started")}) == 4


def test_the_report_opens_offline(reference):
    report = (reference.folder / "report.html").read_text()
    links = re.findall(r"""(?:src|href|data|action)\s*=\s*["']([^"']*)""", report)
    assert [link for link in links if not link.startswith(("data:", "#"))] == []
    assert not re.search(r"@import|url\((?!['\"]?(data:|#))|<script[^>]+src|<link", report)
    assert "data:image" in report or "<svg" in report


def test_the_copy_of_the_file_runs_to_the_same_bits(reference, run):
    rerun = run(**topology_of(reference))
    assert rerun.status == 0, rerun.output
    assert rerun.snapshots() == reference.snapshots()
    assert len(set(reference.snapshots().values())) == 4 * 8
    digests = [{(e["round"], e["sender"], e["peer"]): e["digest"] for e in one.events("delivered")}
               for one in (rerun, reference)]  # fmt: skip
    assert digests[0] == digests[1]
    for peer in range(4):
        weights = f"peers/{peer}/checkpoint.safetensors"
        assert (rerun.folder / weights).read_bytes() == (reference.folder / weights).read_bytes()


def test_a_peer_that_is_slow_changes_no_bit(reference, start):
    running = start(**topology_of(reference))
    pid = running.wait_for(lambda: running.events("round", 1) and running.pid(1))
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1.0)  # being slow takes time
    os.kill(pid, signal.SIGCONT)
    slow = running.end()
    assert slow.status == 0, slow.output
    waits = [event["seconds"]["wait"] for event in slow.events("round") if event["peer"] != 1]
    assert max(waits) > 0.5, "the others were done before it was stopped"
    assert slow.snapshots() == reference.snapshots()


def test_another_seed_gives_other_weights(reference, run):
    other = run("--set", "swarm.seed=2", **topology_of(reference))
    assert other.status == 0, other.output
    assert other.summary["seed"] == 2
    assert not set(other.snapshots().values()) & set(reference.snapshots().values())


def test_unix_sockets_change_no_bit(reference, run):
    ipc = run("--set", "transport.kind=ipc", **topology_of(reference))
    assert ipc.status == 0, ipc.output
    assert ipc.snapshots() == reference.snapshots()
    assert {event["endpoint"].partition(":")[0] for event in ipc.events("started")} == {"ipc"}
    assert ipc.summary["bytes"]["payload"] == reference.summary["bytes"]["payload"]
    assert ipc.summary["connections"]["verified"] == 0
    assert ipc.summary["connections"]["not_available"] == 24


def topology_of(ended):
    return tomllib.loads((ended.folder / "topology.toml").read_text())
