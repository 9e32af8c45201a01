"""Writes report.html: one page that opens offline and says first what went wrong, then what was measured."""

import shlex
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from launch import page, units
from launch.evidence import EVIDENCE, local_models
from launch.faults import FAULTS, faults_fired, never_fired
from launch.figures import DRAWINGS, MESSAGE_PARTS, group_by_model, render
from launch.page import Html
from launch.results import Run, load

FIRST_FEW = 10  # of many like troubles the head of the page names this many; the tables below have all


def write_report(run_dir: str | Path) -> Path:
    """Write figures/*.png and report.html into the run folder and return the page's path."""
    run = load(run_dir)
    folder = run.path / "figures"
    folder.mkdir(exist_ok=True)
    pictures = []
    for drawing in (*DRAWINGS, FAULTS, *EVIDENCE):
        png = render(drawing, run)
        if png is not None:
            (folder / f"{drawing.name}.png").write_bytes(png)
            pictures.append(page.picture(drawing.title, drawing.caption, png))
    path = run.path / "report.html"
    part = path.with_suffix(".html.part")
    part.write_text(page.document(f"{run.summary['name']}: report", _compose(run, pictures)), encoding="utf-8")
    part.replace(path)
    return path


def _compose(run: Run, pictures: list[Html]) -> Html:
    return page.join(
        [
            _title(run),
            page.status(run.summary["status"], _headline(run), list_troubles(run)),
            _key_numbers(run),
            _again(run),
            faults_fired(run),
            _books(run),
            _peers(run),
            local_models(run),
            page.figures(pictures),
            _latency(run),
            *_details(run),
        ]
    )


def _title(run: Run) -> Html:
    plan, summary = run.topology, run.summary
    taking_part = plan.swarm.participants
    words = [
        f"{summary['method']} on {summary['dataset']}",
        f"{summary['peers']} peers, {plan.graph.kind} graph",
        "" if taking_part == "all" else f"{taking_part} taking part in each round",
        f"{plan.data.partition} partition",
        f"seed {summary['seed']}",
        f"started {_moment(summary['started_at'])}",
    ]
    return page.join(
        [
            Html(f"<h1>{page.text(summary['name'])}</h1>"),
            page.paragraph(" · ".join(word for word in words if word), quiet=True),
        ]
    )


def _headline(run: Run) -> str:
    summary = run.summary
    done = f"{summary['rounds_completed']} of {summary['rounds']} rounds"
    kept = summary["peers"] - len(summary["peers_lost"])
    if summary["status"] == "complete":
        return f"Complete: {summary['peers']} peers, {done}."
    if summary["status"] == "degraded":
        return f"Degraded: {kept} of {summary['peers']} peers finished, {done} done by all of them."
    return f"Failed after {done}."


def list_troubles(run: Run) -> list[str]:
    """What went wrong, in words: faults that never fired, then the worst; empty where there is nothing to be told."""
    summary = run.summary
    troubles = never_fired(run) + ([summary["reason"]] if summary["reason"] else [])
    lost = [
        f"Peer {one['peer']} was lost after round {one['last_round']}: {one['reason']}."
        for one in summary["peers_lost"]
    ]
    troubles += _first_few(lost, "peers lost")
    if summary["missing"]:
        rounds = {number for number, _, _ in summary["missing"]}
        never = units.count(len(summary["missing"]), "message")
        when = f"round{'s' if len(rounds) > 1 else ''} {units.ranges(rounds)}"
        troubles.append(f"{never} never came ({when}): see “Messages that never came”.")
    troubles += _first_few(
        [
            f"Peer {one['peer']}, connection {one['direction']} with peer {one['neighbor']}: "
            f"ledger against kernel, sent {units.compared(one['stream_out'], one['kernel_out'])}, "
            f"received {units.compared(one['stream_in'], one['kernel_in'])}."
            for one in summary["connections"]["mismatched"]
        ],
        "connections on which ledger and kernel differ",
    )
    troubles += _first_few(
        [
            f"Edge {one['sender']} → {one['receiver']}: the sender's books say {one['sent']:,} B of payload, "
            f"the receiver's journal {one['received']:,} B."
            for one in summary["bytes"]["disagreements"]
        ],
        "edges on which sender and receiver differ",
    )
    foretold = summary["bytes"]["foretold_payload"]
    if foretold is not None and foretold != summary["bytes"]["payload"]:
        payload = units.compared(summary["bytes"]["payload"], foretold)
        troubles.append(f"Payload differs from what was foretold: {payload}.")
    if run.journals.refused:
        troubles.append(f"{units.count(len(run.journals.refused), 'message')} or connection refused: see “Refused”.")
    return troubles


def _first_few(troubles: list[str], what: str) -> list[str]:
    rest = len(troubles) - FIRST_FEW
    return troubles if rest <= 0 else [*troubles[:FIRST_FEW], f"… and {rest} more {what}."]


def _key_numbers(run: Run) -> Html:
    summary, counted = run.summary, run.summary["bytes"]
    selected = summary["selected_round"]
    chosen = f"round {selected}, {_whose(summary, selected)}" if selected else "none"
    latency = summary["latency_ms"]
    injected = f", {units.milliseconds(summary['injected_ms'])} injected in all" if summary["injected_ms"] else ""
    over = "everything written to the sockets"
    if counted["without_books"]:
        over = "without the peers that left no books"
    elif counted["payload"]:
        over = f"{counted['stream'] / counted['payload'] - 1:+.2%} on the payload"
    startup = "never reached" if summary["startup_s"] is None else f"{summary['startup_s']:.1f} s"
    return page.tiles(
        [
            ("Global accuracy", units.fraction(summary["global_accuracy"]), f"selected: {chosen}"),
            ("Local accuracy", units.fraction(summary["local_accuracy"]), _where_local(run)),
            (
                "Payload",
                units.megabytes(counted["payload"]),
                f"{counted['payload']:,} B, {units.count(len(run.journals.delivered), 'message')}",
            ),
            ("Stream", units.megabytes(counted["stream"]), over),
            (
                "Sent again",
                units.megabytes(counted["retransmitted"]),
                f"{counted['retransmitted']:,} B retransmitted",
            ),
            (
                "Latency, median",
                units.milliseconds(latency["p50"]),
                f"p95 {units.milliseconds(latency['p95'])}, p99 {units.milliseconds(latency['p99'])}{injected}",
            ),
            ("Messages missing", f"{len(summary['missing']):,}", "never came before their deadline"),
            ("Wall time", units.duration(summary["wall_s"]), f"start to first round {startup}"),
            ("Largest peer", units.memory(summary["peak_rss_mb"]), "peak resident memory"),
        ]
    )


def _whose(summary: dict[str, Any], selected: int) -> str:
    if summary["global_accuracy_of"] == "coordinator":
        clients = units.fraction(summary["client_accuracy_by_round"][selected - 1])
        return f"at the coordinator; its clients alone {clients}"
    return f"mean over {summary['peers_by_round'][selected - 1]} peers"


def _where_local(run: Run) -> str:
    return "on the peers' own held-out data" if run.topology.data.held_out else "on test data like the peers' own"


def _again(run: Run) -> Html:
    command = f"swarm run {shlex.quote(str(run.path / 'topology.toml'))}"
    versions = ", ".join(f"{name} {version}" for name, version in run.summary["versions"].items())
    return page.join([page.heading("Run it again"), page.code(command), page.paragraph(versions, quiet=True)])


def _peers(run: Run) -> Html:
    selected = run.summary["selected_round"]
    at_selection = {event["peer"]: event for event in run.journals.rounds if event["round"] == selected}
    received, sent = (
        dict.fromkeys(range(run.summary["peers"]), 0),
        dict.fromkeys(range(run.summary["peers"]), 0),
    )
    for event in run.journals.delivered:
        received[event["peer"]] += event["payload"]
        sent[event["sender"]] += event["payload"]
    stream = {one["peer"]: sum(edge["stream"] for edge in one["edges"]) for one in run.journals.books}
    lost = {one["peer"]: one for one in run.summary["peers_lost"]}
    rows = []
    for peer in range(run.summary["peers"]):
        begun, ended = run.journals.started.get(peer, {}), run.journals.finished.get(peer, {})
        spent = [event["seconds"] for event in run.journals.rounds if event["peer"] == peer]
        total = sum(one["total"] for one in spent)
        samples = begun.get("samples", {})
        rows.append(
            [
                peer,
                units.shorten(begun.get("model", "never started")),
                begun.get("device", "–"),
                " / ".join(f"{samples.get(part, 0):,}" for part in ("train", "validation", "test")),
                units.fraction(at_selection.get(peer, {}).get("global_accuracy")),
                units.fraction(at_selection.get(peer, {}).get("local_accuracy")),
                f"{received[peer] / 1e6:,.2f}",
                f"{sent[peer] / 1e6:,.2f}",
                f"{stream[peer] / 1e6:,.2f}" if peer in stream else "–",
                f"{ended['peak_rss_mb']:,.0f}" if "peak_rss_mb" in ended else "–",
                f"{sum(one['wait'] for one in spent) / total:.0%}" if total else "–",
                f"lost after round {lost[peer]['last_round']}" if peer in lost else ended.get("status", "–"),
            ]
        )
    headers = [
        "peer",
        "model",
        "device",
        "samples: train / val. / test",
        "global acc.",
        "local acc.",
        "payload in MB",
    ]
    headers += ["payload out MB", "stream out MB", "peak MiB", "wait", "end"]
    note = f"Accuracy at the selected round ({selected}). " if selected else ""
    return page.join(
        [
            page.heading("Peers"),
            page.table(headers, rows, left=3),
            page.paragraph(f"{note}Wait: share of a peer's rounds spent waiting for neighbors.", quiet=True),
        ]
    )


def _books(run: Run) -> Html:
    counted, checked = run.summary["bytes"], run.summary["connections"]
    without = set(counted["without_books"])
    edges = {(event["sender"], event["peer"]) for event in run.journals.delivered}
    edges |= {(event["peer"], edge["receiver"]) for event in run.journals.books for edge in event["edges"]}
    compared = [edge for edge in edges if without.isdisjoint(edge)]
    agreed = len(compared) - len(counted["disagreements"])
    foretold = counted["foretold_payload"]
    payload = (
        "not comparable: the run is not whole"
        if foretold is None
        else f"{'equal to the byte' if foretold == counted['payload'] else 'DIFFERENT'}: "
        f"{units.compared(counted['payload'], foretold)}"
    )
    kernel = (
        f"{checked['verified']:,} equal to the byte; {len(checked['mismatched']):,} different; "
        f"{checked['not_available']:,} without kernel counters; {len(checked['unaccounted']):,} never checked"
    )
    answers = [
        ("Payload: measured against foretold", payload),
        (
            "Payload: receivers' journals against senders' books",
            f"equal on {agreed:,} of {len(compared):,} edges",
        ),
        ("Stream: ledger against the kernel's TCP counters, by connection", kernel),
    ]
    if without:
        few = ", ".join(map(str, sorted(without)[:FIRST_FEW])) + (" …" if len(without) > FIRST_FEW else "")
        answers.append(("Peers that left no books, whose stream bytes are not in the total", few))
    return page.join([page.heading("Do the books agree?"), page.facts(answers)])


def _latency(run: Run) -> Html:
    rows = []
    for model, events in group_by_model(run).items():
        for part in ("observed", *MESSAGE_PARTS):
            times = [event[f"{part}_ms"] for event in events]
            low, high = np.percentile(times, (50, 95))
            size = f"{np.mean([event['payload'] for event in events]) / 1e6:,.3f}"
            new = part == "observed"
            first = [model if new else "", part, f"{len(events):,}" if new else "", size if new else ""]
            rows.append([*first, *(f"{value:,.2f}" for value in (float(np.mean(times)), low, high))])
    if not rows:
        return Html("")
    headers = ["sender's model", "part", "messages", "payload MB", "mean ms", "median ms", "p95 ms"]
    note = "The means of the five parts add up to the mean observed time; medians and percentiles do not add."
    return page.join(
        [page.heading("Latency by part"), page.table(headers, rows, left=2), page.paragraph(note, quiet=True)]
    )


def _details(run: Run) -> Iterable[Html]:
    never = [(e["sender"], e["peer"], str(e["reason"]), e["round"]) for e in run.journals.missing]
    given_up = [(e["peer"], e["receiver"], str(e["reason"]), e["round"]) for e in run.journals.undelivered]
    for title, lost in (("Messages that never came", never), ("Messages their sender gave up", given_up)):
        by_edge: dict[tuple[int, int, str], set[int]] = {}
        for sender, receiver, reason, number in lost:
            by_edge.setdefault((sender, receiver, reason), set()).add(number)
        if by_edge:
            yield page.heading(title)
            rows = [[*edge[:2], len(found), units.ranges(found), edge[2]] for edge, found in by_edge.items()]
            headers = ["sender", "receiver", "messages", "rounds", "reason"]
            yield page.table(headers, rows, left=0, wrap_last=True)
    if run.journals.errors:
        yield page.heading("Tracebacks")
        for event in run.journals.errors:
            where = f"Peer {event['peer']} at {event['t']:.1f} s, see also peers/{event['peer']}/log.txt"
            yield page.fold(where, page.code(event["traceback"]))
    if run.journals.refused:
        yield page.heading("Refused")
        rows = [[f"{e['t']:.1f}", e["peer"], e["source"], e["reason"]] for e in run.journals.refused]
        yield page.table(["at s", "by peer", "source", "reason"], rows, left=0, wrap_last=True)
    troubled = [event for event in run.journals.links if event["state"] not in ("alive", "left")]
    if troubled:
        yield page.heading("Links in trouble")
        rows = [[f"{e['t']:.1f}", e["peer"], e["neighbor"], e["state"], e["reason"]] for e in troubled]
        yield page.table(["at s", "peer", "neighbor", "state", "reason"], rows, left=0, wrap_last=True)
    yield page.heading("The topology file")
    yield page.fold("Every setting of this run", page.code((run.path / "topology.toml").read_text("utf-8")))


def _moment(started_at: Any) -> str:
    return datetime.fromisoformat(str(started_at)).strftime("%Y-%m-%d %H:%M:%S %z").strip()
