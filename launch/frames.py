"""Lays what a run wrote down out as tidy pandas data frames; docs/run-folder.md names every column and its unit.

pandas is an extra of its own and is loaded when the first frame is made.
"""

import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.journals import Event, Journals, read_faults

if TYPE_CHECKING:
    from pandas import DataFrame

# Columns that are always there, in this order, with their types. Int64 knows a missing value, int64 does not.
ROUNDS = {"peer": "int64", "round": "int64", "t": "float64", "participates": "bool"}
ROUNDS |= dict.fromkeys(("loss", "validation_accuracy", "local_accuracy", "global_accuracy"), "float64")
ROUNDS |= {"present": "int64", "missing": "int64", "snapshot": "object"}

TRANSFERS = dict.fromkeys(("round", "sender", "receiver"), "int64") | {"t": "float64"}
TRANSFERS |= dict.fromkeys(("payload", "pieces", "repeats"), "int64")
TRANSFERS |= {f"{part}_ms": "float64" for part in ("queue", "wire", "verify", "injected", "inbox", "observed")}
TRANSFERS |= {"digest": "object"}

PEERS = {"peer": "int64", "role": "object", "model": "object", "device": "object"}
PEERS |= dict.fromkeys(("parameters", "threads", "incarnation"), "Int64")
PEERS |= dict.fromkeys(("samples.train", "samples.validation", "samples.test"), "Int64")
PEERS |= {"status": "object", "lost": "object", "last_round": "int64"}
PEERS |= dict.fromkeys(("payload_in", "payload_out"), "int64") | dict.fromkeys(("stream_out", "retransmitted"), "Int64")
PEERS |= dict.fromkeys(("rss_mb", "own_mb", "peak_rss_mb"), "float64")

FAULTS = {"t": "float64", "rule": "object", "kind": "object"}
FAULTS |= dict.fromkeys(("round", "peer", "sender", "receiver"), "Int64")


class MissingPandas(ImportError):
    """The data frames were asked for and pandas is not there; the text says what to install."""


def of_rounds(journals: Journals) -> "DataFrame":
    """One row for each peer and round."""
    rows = [event | {key: len(event[key]) for key in ("present", "missing")} for event in journals.rounds]
    return _frame(rows, ROUNDS)


def of_transfers(journals: Journals) -> "DataFrame":
    """One row for each delivered message."""
    return _frame([event | {"receiver": event["peer"]} for event in journals.delivered], TRANSFERS, leave=("peer",))


def of_peers(journals: Journals, summary: Mapping[str, Any]) -> "DataFrame":
    """One row for each peer, whether it ever started or not."""
    lost = {one["peer"]: one["reason"] for one in summary["peers_lost"]}
    booked = {event["peer"]: event["edges"] for event in journals.books}
    rows = []
    for peer in range(summary["peers"]):
        begun, ended = journals.started.get(peer, {}), journals.finished.get(peer, {})
        row = {"peer": peer} | {key: begun.get(key) for key in PEERS if key in begun}
        row |= {"samples": begun.get("samples", {}), "train_counts": dict(enumerate(begun.get("train_counts", [])))}
        row |= {"status": ended.get("status"), "lost": lost.get(peer), "peak_rss_mb": ended.get("peak_rss_mb")}
        row["last_round"] = max((event["round"] for event in journals.rounds if event["peer"] == peer), default=0)
        row["payload_in"] = sum(event["payload"] for event in journals.delivered if event["peer"] == peer)
        row["payload_out"] = sum(event["payload"] for event in journals.delivered if event["sender"] == peer)
        if peer in booked:
            row["stream_out"] = sum(edge["stream"] for edge in booked[peer])
            row["retransmitted"] = sum(edge["retransmitted"] for edge in booked[peer])
        rows.append(row)
    return _frame(rows, PEERS)


def of_faults(run_dir: Path) -> "DataFrame":
    """One row for each fault as it fired, none where the run had no fault plan."""
    return _frame(read_faults(run_dir), FAULTS)


def _frame(rows: Sequence[Event], columns: Mapping[str, str], leave: Iterable[str] = ()) -> "DataFrame":
    """A row for each event: first the columns that are always there, then what else it says, null as missing."""
    pandas = _import_pandas()
    flat = [_flatten(row) for row in rows]
    more = dict.fromkeys(key for row in flat for key in row if key not in columns and key not in {"event", *leave})
    return pandas.DataFrame(
        {name: pandas.Series([row.get(name) for row in flat], dtype=columns.get(name)) for name in (*columns, *more)}
    )


def _flatten(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values under dotted names. JSON has no NaN and no infinity: the journal has them as text."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = float(value) if value in ("nan", "inf", "-inf") else value
    return flat


def _import_pandas() -> Any:
    try:
        return importlib.import_module("pandas")
    except ModuleNotFoundError as error:
        raise MissingPandas(
            "the data frames of a run need pandas, which is not installed: pip install 'distill-swarm[frames]' (or "
            "pandas itself). The summary, the journals and the report can be had without it."
        ) from error
