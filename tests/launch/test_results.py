"""The summary, computed by hand from small run folders."""

import json
import math
from pathlib import Path

import pytest

from launch.journals import read_journal
from launch.results import Exit, RunFolderError, load, load_summary, write_summary


def test_selects_the_best_mean_validation_round_and_the_earliest_on_ties(make_run):
    run = make_run(peers=2, rounds=3)
    # Mean validation: 0.5, 0.75, 0.75; round 2 wins the tie with round 3.
    table = {1: ((0.4, 0.1, 0.2), (0.6, 0.3, 0.4)), 2: ((0.5, 0.25, 0.5), (1.0, 0.5, 0.25))}
    table[3] = ((0.75, 0.9, 0.9), (0.75, 0.9, 0.9))
    for number, both in table.items():
        for peer, (validation, local, overall) in enumerate(both):
            run.round(peer, number, validation=validation, local=local, overall=overall)
    for peer in range(2):
        run.finish(peer)
    summary = run.close()
    assert summary["selected_round"] == 2
    assert summary["global_accuracy"] == pytest.approx(0.375)
    assert summary["local_accuracy"] == pytest.approx(0.375)
    assert summary["validation_accuracy_by_round"] == pytest.approx([0.5, 0.75, 0.75])
    assert summary["global_accuracy_by_round"] == pytest.approx([0.3, 0.375, 0.9])
    assert summary["local_accuracy_by_round"] == pytest.approx([0.2, 0.375, 0.9])
    assert summary["rounds_completed"] == 3
    assert summary["peers_by_round"] == [2, 2, 2]
    assert summary["peers_lost"] == []


def test_a_round_that_was_not_tested_is_not_selected(make_run):
    run = make_run(peers=1, rounds=3)
    run.round(0, 1, validation=0.4, local=0.1, overall=0.2)
    run.round(0, 2, validation=0.9, local=0.8, overall=None)
    run.round(0, 3, validation=0.6, local=0.3, overall=0.4)
    run.finish(0)
    summary = run.close()
    assert summary["selected_round"] == 3
    assert summary["global_accuracy"] == 0.4
    assert summary["global_accuracy_by_round"] == [0.2, None, 0.4]


def test_without_held_out_data_the_last_tested_round_is_selected(make_run):
    run = make_run(peers=1, rounds=3)
    for number, overall in ((1, 0.8), (2, 0.3), (3, None)):
        run.round(0, number, overall=overall)
    run.finish(0)
    summary = run.close()
    assert summary["selected_round"] == 2
    assert summary["global_accuracy"] == 0.3
    assert summary["local_accuracy"] is None
    assert summary["validation_accuracy_by_round"] == [None, None, None]


def test_a_lost_peer_counts_in_the_rounds_it_completed_and_no_longer(make_run):
    run = make_run(peers=3, rounds=3)
    for number in (1, 2, 3):
        run.round(0, number, validation=0.1 * number, local=0.1, overall=0.1)
        run.round(1, number, validation=0.1 * number, local=0.3, overall=0.3)
    run.round(2, 1, validation=0.1, local=0.8, overall=0.8)
    run.append(2, '{"event": "round", "t": 3.0, "roun')  # killed in the middle of a line
    run.finish(0)
    run.finish(1)
    summary = run.close(status="degraded", exits={0: Exit(0), 1: Exit(0), 2: Exit(-9)})
    assert summary["status"] == "degraded"
    assert summary["peers_lost"] == [{"peer": 2, "reason": "killed by SIGKILL", "last_round": 1}]
    assert summary["peers_by_round"] == [3, 2, 2]
    assert summary["global_accuracy_by_round"] == pytest.approx([0.4, 0.2, 0.2])
    assert summary["selected_round"] == 3
    assert summary["global_accuracy"] == pytest.approx(0.2)
    assert summary["rounds_completed"] == 3


def test_only_rounds_that_every_survivor_completed_are_selected(make_run):
    run = make_run(peers=2, rounds=3)
    for number, validation in ((1, 0.5), (2, 0.6), (3, 0.9)):
        run.round(0, number, validation=validation, overall=0.5)
    for number, validation in ((1, 0.5), (2, 0.6)):
        run.round(1, number, validation=validation, overall=0.7)
    for peer in range(2):
        run.finish(peer, status="stopped")
    summary = run.close(status="failed", reason="stopped by Ctrl-C")
    assert summary["peers_lost"] == []
    assert summary["reason"] == "stopped by Ctrl-C"
    assert summary["selected_round"] == 2
    assert summary["rounds_completed"] == 2
    assert summary["global_accuracy"] == pytest.approx(0.6)


def test_with_no_survivor_no_round_is_selected(make_run):
    run = make_run(peers=1)
    run.round(0, 1, validation=0.5, overall=0.5)
    summary = run.close(status="failed", exits={0: Exit(1)})
    assert (summary["selected_round"], summary["global_accuracy"], summary["rounds_completed"]) == (
        None,
        None,
        0,
    )
    assert summary["global_accuracy_by_round"] == [0.5]


def test_a_run_that_died_before_any_peer_wrote_still_has_a_summary(make_run):
    run = make_run(peers=2)
    summary = run.close(status="failed", startup_s=None, reason="the fork server died")
    assert [one["peer"] for one in summary["peers_lost"]] == [0, 1]
    assert summary["global_accuracy_by_round"] == []
    assert summary["bytes"]["payload"] == 0
    assert summary["latency_ms"] == {"p50": None, "p95": None, "p99": None}
    assert summary["peak_rss_mb"] is None
    assert load(run.path).journals.rounds == []


@pytest.mark.parametrize(
    ("end", "traceback", "reason"),
    [
        (Exit(-9, "killed by the out-of-memory killer"), None, "killed by the out-of-memory killer"),
        (
            Exit(1),
            "Traceback …\n  File …\nRuntimeError: loss is not finite\n",
            "RuntimeError: loss is not finite",
        ),
        (Exit(-11), None, "killed by SIGSEGV"),
        (Exit(-250), None, "killed by signal 250"),
        (Exit(7), None, "exit status 7 without a word in its journal"),
        (Exit(0), None, "its journal ends without a finished event"),
    ],
)
def test_says_why_a_peer_was_lost(make_run, end, traceback, reason):
    run = make_run(peers=1)
    run.start(0)
    if traceback:
        run.write(0, "error", traceback=traceback)
    assert run.close(status="failed", exits={0: end})["peers_lost"] == [{"peer": 0, "reason": reason, "last_round": 0}]


def test_a_peer_that_finished_but_then_crashed_is_lost(make_run):
    run = make_run(peers=1, rounds=1)
    run.round(0, 1, overall=0.5)
    run.finish(0)
    lost = run.close(status="degraded", exits={0: Exit(-6)})["peers_lost"]
    assert lost == [{"peer": 0, "reason": "killed by SIGABRT", "last_round": 1}]


def test_counts_payload_where_it_arrived_and_stream_where_it_was_sent(make_run):
    run = make_run(peers=2, rounds=2)
    for number in (1, 2):
        run.deliver(0, number, 1, payload=700)
        run.deliver(1, number, 0, payload=300)
        for peer in range(2):
            run.round(peer, number, overall=0.5)
    run.book(0, (1, 2, 600, 650, 40))
    run.book(1, (0, 2, 1400, 1470, 0))
    for peer in range(2):
        run.finish(peer)
    assert run.close(foretold_payload_by_round=[1000, 1000])["bytes"] == {
        "payload": 2000,
        "payload_by_round": [1000, 1000],
        "foretold_payload": 2000,
        "stream": 2120,
        "retransmitted": 40,
        "without_books": [],
        "disagreements": [],
    }


def test_an_edge_on_which_sender_and_receiver_differ_is_named(make_run):
    run = make_run(peers=2, rounds=1)
    run.deliver(1, 1, 0, payload=200)
    run.book(0, (1, 1, 300, 350, 0))
    run.book(1, (0, 1, 300, 350, 0))
    assert run.close()["bytes"]["disagreements"] == [
        {"sender": 0, "receiver": 1, "sent": 300, "received": 200},
        {"sender": 1, "receiver": 0, "sent": 300, "received": 0},
    ]


def test_a_lost_peers_books_are_named_as_absent_and_nothing_is_compared_with_them(make_run):
    run = make_run(peers=2, rounds=1)
    run.deliver(0, 1, 1, payload=700)
    run.round(0, 1, overall=0.5)
    run.book(0, (1, 1, 300, 350, 0))  # sent and taken, but peer 1 died before it wrote that it had it
    run.finish(0)
    counted = run.close(status="degraded", exits={0: Exit(0), 1: Exit(-9)}, foretold_payload_by_round=[1000])["bytes"]
    assert counted["payload"] == 700
    assert counted["foretold_payload"] is None
    assert counted["stream"] == 350
    assert counted["without_books"] == [1]
    assert counted["disagreements"] == []


def test_latency_is_over_observed_times_and_injected_time_is_kept_apart(make_run):
    run = make_run(peers=2)
    for observed in (10.0, 20.0, 30.0, 40.0, 50.0):
        run.deliver(0, 1, 1, parts_ms=(0.0, observed - 4.0, 1.0, 2.0, 1.0))
    summary = run.close()
    # Linear interpolation between order statistics: p95 lies 0.8 of the way from 40 to 50, p99 0.96.
    assert summary["latency_ms"] == pytest.approx({"p50": 30.0, "p95": 48.0, "p99": 49.6})
    assert summary["injected_ms"] == pytest.approx(10.0)


def test_every_connection_end_is_verified_mismatched_unavailable_or_unaccounted(make_run):
    run = make_run(peers=3)
    run.deliver(0, 1, 1)
    run.deliver(2, 1, 0)  # peer 2 never wrote about its connections
    run.connect(0, 1)
    run.connect(0, 2, verified=None, kernel=(None, None), note="ipc has no counters")
    run.connect(1, 0, verified=False, stream=(500, 60), kernel=(512, 60), direction="in")
    assert run.close()["connections"] == {
        "verified": 1,
        "mismatched": [
            {
                "peer": 1,
                "neighbor": 0,
                "direction": "in",
                "stream_out": 500,
                "kernel_out": 512,
                "stream_in": 60,
                "kernel_in": 60,
                "note": "",
            }
        ],
        "not_available": 1,
        "unaccounted": [[2, 0]],
    }


def test_peak_memory_is_the_largest_peers_even_of_one_that_was_lost(make_run):
    run = make_run(peers=3)
    for peer, rss_mb in enumerate((90.0, 91.0, 400.0)):
        run.start(peer, rss_mb=rss_mb)
    run.finish(0, peak_rss_mb=210.0)
    run.finish(1, peak_rss_mb=190.0)
    assert run.close(status="degraded", exits={2: Exit(-9)})["peak_rss_mb"] == 400.0


def test_lists_each_missing_message_once_in_order(make_run):
    run = make_run(peers=3)
    for receiver, number, sender in ((2, 1, 0), (1, 2, 0), (1, 1, 2), (1, 1, 0), (1, 1, 0)):
        run.write(receiver, "missing", round=number, sender=sender, reason="deadline")
    # [round, receiver, sender]
    assert run.close()["missing"] == [[1, 1, 0], [1, 1, 2], [1, 2, 0], [2, 1, 0]]


def test_the_file_holds_what_summarize_returned_and_every_key_of_the_contract(make_run):
    run = make_run(peers=1, rounds=1, seed=5, extra='[method]\nname = "uniform"\n[data]\nname = "cifar10"\n')
    run.round(0, 1, validation=0.5, local=0.6, overall=0.7)
    run.write(0, "missing", round=1, sender=0, reason="deadline")
    run.finish(0)
    summary = run.close(startup_s=1.5)
    text = (run.path / "summary.json").read_text()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON")) == summary
    assert load_summary(run.path) == summary
    contract = "schema name method dataset peers rounds seed status selected_round global_accuracy "
    contract += "local_accuracy global_accuracy_by_round wall_s startup_s bytes latency_ms peak_rss_mb faults "
    contract += "missing versions"
    assert set(contract.split()) <= summary.keys()
    expected = {"schema": 2, "name": "digits-ring", "method": "uniform", "dataset": "cifar10", "peers": 1}
    expected |= {"rounds": 1, "seed": 5, "status": "complete", "wall_s": 12.5, "startup_s": 1.5, "faults": {}}
    assert {key: summary[key] for key in expected} == expected
    assert summary["versions"]["python"].startswith("3.")
    assert "torch" in summary["versions"]


def test_the_journal_schema_page_names_every_key_of_the_summary(make_run):
    summary = make_run(peers=1).close(status="failed")
    page = (Path(__file__).parents[2] / "docs" / "run-folder.md").read_text(encoding="utf-8")
    nested = [key for part in ("bytes", "connections") for key in summary[part]]
    assert [key for key in (*summary, *nested) if f"`{key}`" not in page] == []


def test_a_summary_that_cannot_be_written_leaves_the_old_one(make_run):
    run = make_run(peers=1)
    run.close(status="failed")
    before = (run.path / "summary.json").read_bytes()
    with pytest.raises(ValueError):
        write_summary(run.path, {"schema": 2, "wall_s": math.nan})
    assert (run.path / "summary.json").read_bytes() == before


def test_load_gives_the_topology_the_summary_and_all_events_with_their_peer(make_run):
    run = make_run(peers=12, rounds=1)
    for peer in (11, 2, 0):
        run.start(peer, model=f"model-{peer}")
        run.round(peer, 1, overall=0.5)
        run.write(peer, "something-from-the-future", answer=42)
    run.deliver(2, 1, 11, payload=77)
    run.write(0, "undelivered", round=1, receiver=2, reason="gave up after 5 attempts")
    run.write(0, "link", neighbor=2, state="suspect", reason="no beat for 5 s")
    run.write(0, "refused", source="127.0.0.1:9", reason="another run's id")
    run.write(0, "error", traceback="ValueError: x")
    run.book(2, (11, 1, 1, 2, 0))
    run.connect(2, 11)
    run.finish(0)
    run.close(status="degraded")
    loaded = load(str(run.path))
    assert loaded.path == run.path
    assert loaded.topology.swarm.peers == 12
    assert loaded.summary["status"] == "degraded"
    assert {peer: event["model"] for peer, event in loaded.journals.started.items()} == {
        0: "model-0",
        2: "model-2",
        11: "model-11",
    }
    assert [event["peer"] for event in loaded.journals.rounds] == [0, 2, 11]
    assert [(e["peer"], e["sender"], e["payload"]) for e in loaded.journals.delivered] == [(2, 11, 77)]
    assert list(loaded.journals.finished) == [0]
    kinds = (
        loaded.journals.undelivered,
        loaded.journals.links,
        loaded.journals.refused,
        loaded.journals.errors,
        loaded.journals.books,
        loaded.journals.connections,
    )
    assert [[event["peer"] for event in events] for events in kinds] == [[0], [0], [0], [0], [2], [2]]


def test_a_last_line_torn_at_any_byte_is_forgotten(tmp_path):
    journal = tmp_path / "events.jsonl"
    whole = b'{"event": "started", "t": 0.1}\n'
    last = '{"event": "error", "t": 0.2, "traceback": "naïve {\\"a\\": 1}"}'.encode()
    for cut in range(len(last)):
        journal.write_bytes(whole + last[:cut])
        assert [event["event"] for event in read_journal(journal)] == ["started"], cut
    journal.write_bytes(whole + last)
    assert [event["event"] for event in read_journal(journal)] == ["started", "error"]


def test_a_line_torn_by_a_kill_may_be_followed_by_the_next_incarnation_only(tmp_path):
    journal = tmp_path / "events.jsonl"
    journal.write_text('{"event": "round", "ro\n{"event": "started", "incarnation": 2}\n')
    assert [event["event"] for event in read_journal(journal)] == ["started"]
    journal.write_text('{"event": "started"}\n{"event": "round", "ro\n{"event": "finished"}\n')
    with pytest.raises(RunFolderError, match=r"events\.jsonl, line 2 .* only the last line"):
        read_journal(journal)


def test_a_round_done_again_by_a_later_incarnation_replaces_the_first(make_run):
    run = make_run(peers=1, rounds=1)
    run.round(0, 1, overall=0.2)
    run.start(0)
    run.round(0, 1, overall=0.6)
    run.finish(0)
    summary = run.close()
    assert summary["global_accuracy_by_round"] == [0.6]
    assert summary["peers_by_round"] == [1]


def test_says_what_is_missing_from_a_folder_that_is_no_run_folder(make_run, tmp_path):
    with pytest.raises(RunFolderError, match=r"nowhere does not exist: give a folder that `swarm run` made"):
        load(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="is a file, not a run folder"):
        load(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunFolderError, match=r"is not a run folder, it has no topology\.toml"):
        load(tmp_path / "empty")
    run = make_run()
    with pytest.raises(RunFolderError, match=r"has no summary\.json: the run is still going, or its supervisor"):
        load(run.path)
    (run.path / "summary.json").write_text('{"schema": 99}')
    with pytest.raises(RunFolderError, match="has schema 99, this version reads schema 2"):
        load(run.path)
    (run.path / "summary.json").write_text("[1]")
    with pytest.raises(RunFolderError, match="has schema None"):
        load(run.path)
    (run.path / "summary.json").write_text('{"sch')
    with pytest.raises(RunFolderError, match="is not JSON"):
        load(run.path)
