"""Between reading a file and running it: all that can be wrong is found before a process is started."""

import resource
import socket
from pathlib import Path

import psutil
from rich.console import Console

from launch.libraries import release_library_pages
from launch.live import view_for
from launch.replay import check_replay
from launch.supervisor import Supervisor
from peer.devices import CUDA_CONTEXT_MB, free_device_mb
from peer.plan import Plan, make_plan
from peer.rehearsal import rehearse
from topology import Topology, TopologyError
from topology.file import dump
from topology.neighbors import Neighbors
from transport.memory import keep_freed_memory

DESCRIPTORS_A_NEIGHBOR = 8
DESCRIPTORS_A_PEER = 64


def start(
    topology: Topology,
    neighbors: Neighbors,
    folder: Path,
    console: Console,
    quiet: bool,
    zero: float,
    replay: Path | None = None,
) -> Supervisor:
    """A supervisor ready to run, its fork server waiting. Raises `TopologyError` before anything has been started."""
    plan = make_plan(topology, neighbors)
    if replay is not None:
        replay = check_replay(replay, plan.topology)
    check_ports(topology)
    check_descriptors(plan)
    check_memory(plan)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "topology.toml").open("x") as copy:  # of two runs into one folder, one is first
            copy.write(dump(plan.topology))
    except FileExistsError as error:
        raise TopologyError(f"--out: another run has just begun in {folder}. Name another folder") from error
    except OSError as error:
        raise TopologyError(f"--out: cannot write to {folder}: {error.strerror}") from error
    keep_freed_memory()
    rehearse(plan)
    release_library_pages()
    return Supervisor(plan, folder, view_for(console, quiet), zero, replay)


def check_ports(topology: Topology) -> None:
    """A port that was asked for must be free, and an address one of this machine's."""
    for override in topology.peer:
        if override.port or not override.loopback:
            key = "port" if override.port else "host"
            family = socket.AF_INET6 if ":" in override.host else socket.AF_INET
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((override.host, override.port))
                except OSError as error:
                    raise TopologyError(
                        f"[[peer]] {override.id}: {key}: {override.host}:{override.port} cannot be bound: "
                        f"{error.strerror}. Choose another, or leave the key out: any free port is then taken"
                    ) from error


def check_memory(plan: Plan) -> None:
    """The peers' predicted memory must fit the machine, and each CUDA device that several peers share."""
    need = sum(plan.predicted_memory_mb(peer) for peer in plan.peers if plan.devices[peer] == "cpu")
    _require("this machine", len(plan.peers), need, psutil.virtual_memory().available / 1e6)
    shared = sorted(set(plan.devices) - {"cpu"})
    free = free_device_mb() if shared else {}
    for device in shared:
        peers = [peer for peer in plan.peers if plan.devices[peer] == device]
        need = sum(CUDA_CONTEXT_MB + plan.predicted_memory_mb(peer) for peer in peers)
        _require(device, len(peers), need, free[device])


def _require(where: str, peers: int, need: float, free: float) -> None:
    if need > free:
        raise TopologyError(
            f"swarm.peers: {peers} peers on {where} would need about {need:,.0f} MB of memory, {free:,.0f} MB are "
            "free. Take fewer peers, smaller models (models.pool), a smaller training.batch_size, or more devices"
        )


def check_descriptors(plan: Plan) -> None:
    """Raise the soft limit of open files to what the widest peer needs, which its processes inherit."""
    widest = max(len(plan.neighbors.receivers[peer]) + len(plan.neighbors.senders[peer]) for peer in plan.peers)
    need = DESCRIPTORS_A_PEER + DESCRIPTORS_A_NEIGHBOR * widest
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and need > hard:
        raise TopologyError(
            f"graph: a peer with {widest} edges needs about {need} open files, this system allows {hard}. "
            "Raise the limit (ulimit -Hn) or choose a graph of a smaller degree"
        )
    if need > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
