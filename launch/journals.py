"""Reads the peers' journals: every whole line is kept as it was written, a torn last line is forgotten."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class RunFolderError(ValueError):
    """The folder is not a run folder, or what lies in it cannot be read; str(e) says which and what to do."""


@dataclass(frozen=True, kw_only=True)
class Journals:
    """What all peers wrote, in peer order; every event also carries the `peer` whose journal it is from."""

    started: dict[int, Event]  # the latest incarnation's
    finished: dict[int, Event]
    rounds: list[Event]
    delivered: list[Event]
    missing: list[Event]
    undelivered: list[Event]
    links: list[Event]
    refused: list[Event]
    books: list[Event]
    connections: list[Event]
    errors: list[Event]


def read_journals(run_dir: Path) -> Journals:
    """Read peers/*/events.jsonl; a peer that never came to writing one simply has no events."""
    events: dict[str, list[Event]] = {}
    for folder in sorted((run_dir / "peers").glob("[0-9]*"), key=lambda folder: int(folder.name)):
        journal = folder / "events.jsonl"
        if journal.is_file():
            for event in read_journal(journal):
                events.setdefault(event["event"], []).append(event | {"peer": int(folder.name)})
    rounds = {(event["peer"], event["round"]): event for event in events.get("round", [])}
    return Journals(
        started={event["peer"]: event for event in events.get("started", [])},
        finished={event["peer"]: event for event in events.get("finished", [])},
        rounds=list(rounds.values()),
        delivered=events.get("delivered", []),
        missing=events.get("missing", []),
        undelivered=events.get("undelivered", []),
        links=events.get("link", []),
        refused=events.get("refused", []),
        books=events.get("books", []),
        connections=events.get("connection", []),
        errors=events.get("error", []),
    )


def read_journal(journal: Path) -> list[Event]:
    """The events of one journal. A line torn by a kill can only be the last one an incarnation wrote."""
    events: list[Event] = []
    torn: int | None = None
    for number, line in enumerate(journal.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        event = _decode(line)
        if torn is not None and (event is None or event["event"] != "started"):
            raise RunFolderError(
                f"{journal}, line {torn} is not a JSON object with an 'event': only the last line that a "
                "peer wrote may be torn. The file was changed after the run; restore it."
            )
        if event is None:
            torn = number
        else:
            torn = None
            events.append(event)
    return events


def read_faults(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of faults.jsonl; a run without a fault plan has no such file. A torn last line is forgotten."""
    path = run_dir / "faults.jsonl"
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    whole = [(number, line) for number, line in enumerate(lines[:-1], start=1) if line.strip()]
    faults = []
    for number, line in whole:
        try:
            faults.append(dict(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise RunFolderError(f"{path}, line {number} is no JSON object: it was changed after the run.") from error
    return faults


def _decode(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None
