"""What a plan would do, before it does it: as one JSON object or as a page for a person."""

from typing import Any

from rich.console import Console
from rich.table import Table

from launch.units import megabytes
from peer.plan import Plan
from topology import graphs


def describe(plan: Plan) -> dict[str, Any]:
    """The plan as data. Payload bytes are exact; memory is an estimate."""
    by_round = [plan.payload(round) for round in plan.rounds]
    return {
        "name": plan.topology.swarm.name,
        "method": plan.topology.method.name,
        "dataset": plan.data.name,
        "peers": len(plan.peers),
        "public_samples": len(plan.public),
        "rounds": len(plan.rounds),
        "edges": len(plan.neighbors.edges),
        "connected": graphs.is_connected(graphs.build(plan.topology)),
        "spectral_gap": graphs.spectral_gap(plan.neighbors.mixing),
        "payload_bytes_per_round": by_round[0] if len(set(by_round)) == 1 else sum(by_round) / len(by_round),
        "payload_bytes_by_round": by_round,
        "payload_bytes_total": sum(by_round),
        "predicted_memory_mb": round(sum(plan.predicted_memory_mb(peer) for peer in plan.peers), 1),
        "plan": [
            {
                "peer": peer,
                "model": plan.facts[peer].label,
                "parameters": plan.facts[peer].parameters,
                "device": plan.devices[peer],
                "threads": plan.threads[peer],
                "role": "coordinator" if peer == plan.coordinator else "client",
                "message_bytes": _message_bytes(plan, peer, 1),
                "last_message_bytes": _message_bytes(plan, peer, len(plan.rounds)),
                "sends_to": sorted(plan.neighbors.receivers[peer]),
                "train": len(plan.shards[peer].train),
                "validation": len(plan.shards[peer].validation),
                "test": len(plan.shards[peer].test),
                "predicted_memory_mb": plan.predicted_memory_mb(peer),
            }
            for peer in plan.peers
        ],
    }


def _message_bytes(plan: Plan, peer: int, round: int) -> int:
    """The largest message that a peer sends to one neighbor in a round."""
    return max((plan.message(peer, receiver, round).bytes for receiver in plan.neighbors.receivers[peer]), default=0)


def print_plan(plan: Plan, console: Console) -> None:
    """The plan as a page."""
    facts = describe(plan)
    table = Table(title=f"{facts['name']}: {facts['method']} on {facts['dataset']}", title_justify="left")
    for column in (
        "peer",
        "model",
        "device",
        "threads",
        "parameters",
        "samples",
        "message, B",
        "sends to",
        "memory",
    ):
        table.add_column(column, justify="left" if column in ("model", "device", "sends to") else "right")
    for peer in facts["plan"]:
        to = ", ".join(map(str, peer["sends_to"][:8])) + (" …" if len(peer["sends_to"]) > 8 else "")
        table.add_row(
            str(peer["peer"]),
            peer["model"] if peer["role"] == "client" else "coordinator",
            peer["device"],
            str(peer["threads"]),
            f"{peer['parameters']:,}",
            f"{peer['train']} + {peer['validation']} + {peer['test']}",
            _first_and_last(peer["message_bytes"], peer["last_message_bytes"]),
            to,
            f"{peer['predicted_memory_mb']:.0f} MB",
        )
    table.caption = "samples: training + validation + test; message: payload to one neighbor"
    console.print(table)
    by_round = facts["payload_bytes_by_round"]
    connected = "connected" if facts["connected"] else "NOT connected"
    console.print(
        f"{facts['peers']} peers, {facts['edges']} directed edges, {connected}, "
        f"spectral gap {facts['spectral_gap']:.4f}\n"
        f"payload: {_first_and_last(by_round[0], by_round[-1])} bytes a round, {facts['payload_bytes_total']:,} bytes "
        f"({megabytes(facts['payload_bytes_total'])}) in {facts['rounds']} rounds\n"
        f"predicted memory: {facts['predicted_memory_mb']:,.0f} MB",
        highlight=False,
    )


def _first_and_last(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,}, at last {last:,}"
