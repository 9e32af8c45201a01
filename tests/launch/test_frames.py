"""A run as data frames: one row for each thing that happened, and numbers where numbers are meant."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from launch import frames
from launch.journals import RunFolderError
from launch.results import load

PAGE = (Path(__file__).parents[2] / "docs" / "run-folder.md").read_text("utf-8")
COLUMNS = {"rounds": frames.ROUNDS, "transfers": frames.TRANSFERS, "peers": frames.PEERS, "faults": frames.FAULTS}


@pytest.fixture
def run(make_run):
    """Peer 1 is killed in its second round, peer 2 never starts."""
    run = make_run(peers=3, rounds=2)
    for peer in (0, 1):
        run.start(peer, model=f"model-{peer}")
        run.round(peer, 1, validation=0.5, local=0.25, overall=None, method={"support": 3, "by": {"class": 0.5}})
    run.round(0, 2, overall=0.75, participates=False)
    run.deliver(0, 1, 1, payload=700, parts_ms=(1.0, 2.0, 3.0, 4.0, 5.0))
    run.deliver(1, 1, 0, payload=500)
    run.deliver(0, 2, 1, payload=70)
    run.book(0, (1, 1, 500, 600, 10), (2, 0, 0, 40, 1))
    run.finish(0, peak_rss_mb=150.0)
    run.close(status="degraded")
    return run


def test_rounds(run):
    rounds = load(run.path).rounds
    assert list(zip(rounds["peer"], rounds["round"], strict=True)) == [(0, 1), (0, 2), (1, 1)]
    assert rounds["participates"].tolist() == [True, False, True]
    assert rounds["loss"].isna().tolist() == [False, True, False]
    assert rounds["global_accuracy"].isna().tolist() == [True, False, True]
    assert rounds["validation_accuracy"].mean() == 0.5
    assert rounds["seconds.train"].tolist() == [1.0, 1.0, 1.0]
    assert rounds.loc[0, "method.support"] == 3 and rounds.loc[0, "method.by.class"] == 0.5
    assert rounds["method.support"].isna().tolist() == [False, True, False]
    assert "event" not in rounds.columns


def test_neighbors_are_counted_and_a_loss_that_is_no_number_is_missing(make_run):
    run = make_run(peers=1, rounds=1)
    facts = {"participates": True, "validation_accuracy": None, "local_accuracy": None, "global_accuracy": 0.5}
    facts |= {"seconds": {}, "present": [4, 7], "missing": [9], "snapshot": "00", "method": {"gap": "inf"}}
    run.write(0, "round", round=1, loss="nan", **facts)
    run.close()
    (row,) = load(run.path).rounds.to_dict("records")
    assert (row["present"], row["missing"]) == (2, 1)
    assert pd.isna(row["loss"]) and row["method.gap"] == float("inf")


def test_transfers(run):
    transfers = load(run.path).transfers
    assert transfers[["round", "sender", "receiver", "payload"]].to_numpy().tolist() == [
        [1, 1, 0, 700],
        [2, 1, 0, 70],
        [1, 0, 1, 500],
    ]
    parts = [f"{part}_ms" for part in ("queue", "wire", "verify", "injected", "inbox")]
    assert transfers[parts].sum(axis=1).tolist() == transfers["observed_ms"].tolist() == [15.0, 4.0, 4.0]
    assert "peer" not in transfers.columns


def test_peers(run):
    peers = load(run.path).peers
    assert peers["peer"].tolist() == [0, 1, 2]
    assert peers["model"].tolist()[:2] == ["model-0", "model-1"] and pd.isna(peers.loc[2, "model"])
    assert peers["samples.train"].tolist() == [80, 81, pd.NA]
    assert peers["train_counts.1"].tolist()[:2] == [40, 41]
    assert peers["status"].isna().tolist() == [False, True, True]
    assert peers["lost"].isna().tolist() == [True, False, False]
    assert peers["last_round"].tolist() == [2, 1, 0]
    assert peers[["payload_in", "payload_out"]].to_numpy().tolist() == [[770, 500], [500, 770], [0, 0]]
    assert peers["stream_out"].tolist() == [640, pd.NA, pd.NA]
    assert peers["retransmitted"].tolist() == [11, pd.NA, pd.NA]
    assert peers.loc[0, "peak_rss_mb"] == 150.0 and pd.isna(peers.loc[1, "peak_rss_mb"])


def test_faults_are_the_lines_of_their_file_but_for_a_torn_last_one(run):
    lines = [{"t": 1.5, "rule": "wan", "sender": 3, "delay_ms": 80}, {"t": 2.0, "rule": "die", "peer": 1}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run.path / "faults.jsonl").write_text(text + '{"t": 3.0, "ru')
    faults = load(run.path).faults
    assert faults["rule"].tolist() == ["wan", "die"]
    assert faults["sender"].tolist() == [3, pd.NA]
    assert faults["delay_ms"].sum() == 80
    (run.path / "faults.jsonl").write_text('{"t": 3.0, "ru\n' + text)
    with pytest.raises(RunFolderError, match=r"faults\.jsonl, line 1"):
        _ = load(run.path).faults


def test_empty_frames_have_their_columns_and_types(make_run):
    run = make_run(peers=1)
    run.close(status="failed")
    loaded = load(run.path)
    for name in ("rounds", "transfers", "faults"):
        frame = getattr(loaded, name)
        assert len(frame) == 0
        assert frame.dtypes.astype(str).to_dict() == COLUMNS[name]
    assert loaded.peers["last_round"].tolist() == [0]


def test_a_frame_is_made_once(run):
    loaded = load(run.path)
    assert loaded.rounds is loaded.rounds


@pytest.mark.parametrize("name", COLUMNS)
def test_every_column_has_its_place_on_the_page(name):
    section = PAGE.split("## Data frames")[1].split(f"`run.{name}`, one row")[1].split("\n`run.")[0]
    for column in COLUMNS[name]:
        assert f"`{column}`" in section


def test_pandas_is_loaded_when_asked_for_and_what_to_do_without_it_is_told(run):
    code = f"""
import sys
sys.modules["pandas"] = None  # as if it were not installed
from launch.results import load
run = load({str(run.path)!r})
print(run.summary["status"])
run.rounds
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "degraded\n"
    assert "pip install 'distill-swarm[frames]'" in done.stderr
