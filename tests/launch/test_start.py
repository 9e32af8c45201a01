"""What would go wrong later is found before a process is started: ports, memory, descriptors."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launch import libraries, start
from peer.plan import make_plan
from topology import Topology, TopologyError, load
from topology.neighbors import neighbors_in

SMALL = '[swarm]\npeers = 3\nrounds = 1\n[models]\npool = [{ name = "mlp", hidden = [8] }]\n'


def topology(folder: Path, text: str = "") -> Topology:
    file = folder / "swarm.toml"
    file.write_text(SMALL + text)
    return load(file)


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(TopologyError, match=rf"\[\[peer\]\] 1: port: 127.0.0.1:{port} .*in use.*Choose another"):
            start.check_ports(topology(tmp_path, f"[[peer]]\nid = 1\nport = {port}\n"))
    start.check_ports(topology(tmp_path, f"[[peer]]\nid = 1\nport = {port}\n"))


def test_memory_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(topology(tmp_path))
    start.check_memory(plan)

    class Little:
        available = 100e6

    monkeypatch.setattr(start.psutil, "virtual_memory", Little)
    with pytest.raises(TopologyError, match=r"swarm.peers: 3 peers on this machine .* 100 MB are free"):
        start.check_memory(plan)


def test_devices_are_checked_each_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(topology(tmp_path))
    object.__setattr__(plan, "devices", ("cuda:0", "cuda:1", "cuda:0"))
    monkeypatch.setattr(start, "free_device_mb", lambda: {"cuda:0": 2000.0, "cuda:1": 700.0})
    start.check_memory(plan)
    monkeypatch.setattr(start, "free_device_mb", lambda: {"cuda:0": 1000.0, "cuda:1": 700.0})
    with pytest.raises(TopologyError, match="2 peers on cuda:0"):
        start.check_memory(plan)


def test_descriptors_are_raised_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(topology(tmp_path))
    limits = [(10, 4096)]
    monkeypatch.setattr(start.resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(start.resource, "setrlimit", lambda _, limit: limits.append(limit))
    start.check_descriptors(plan)
    assert limits[-1][0] >= 4 * start.DESCRIPTORS_A_NEIGHBOR and limits[-1][1] == 4096
    limits.append((10, 20))
    with pytest.raises(TopologyError, match="open files, this system allows 20"):
        start.check_descriptors(plan)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(TopologyError, match="--out: cannot write to"):
        swarm = topology(tmp_path)
        start.start(swarm, neighbors_in(swarm), tmp_path / "file" / "run", None, True, 0.0)  # type: ignore[arg-type]


def test_releasing_library_pages_gives_memory_back_and_breaks_nothing() -> None:
    script = (
        "import torch, numpy, zmq\n"
        "from launch.libraries import release_library_pages\n"
        "def mapped(): return next(int(line.split()[1]) for line in open('/proc/self/smaps_rollup')"
        " if line.startswith('Pss_File'))\n"
        "before = mapped(); release_library_pages(); after = mapped()\n"
        "assert after < before / 2, (before, after)\n"
        "m = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 2))\n"
        "m(torch.ones(2, 1, 8, 8)).sum().backward(); numpy.linalg.eigvals(numpy.eye(3)); zmq.Context().term()\n"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("library", "permissions", "anonymous", "swapped", "given_back"),
    [
        ("/usr/lib/libc.so.6", "r-xp", 0, 0, True),
        ("/usr/lib/libc.so.6", "r--p", 8, 0, False),
        ("/usr/lib/libc.so.6", "r--p", 0, 4, False),
        ("/usr/lib/libc.so.6", "rw-p", 0, 0, False),
        ("/venv/torch/lib/libtorch_cpu.so", "rw-p", 0, 0, True),
        ("/venv/torch/lib/libtorch_cpu.so", "rw-p", 4, 0, False),
        ("/venv/torch/lib/libtorch_cpu.so", "rw-p", 0, 4, False),
        ("/venv/torch/lib/libtorch_cpu.so", "r--s", 0, 0, False),
        ("/data/images.npz", "r--p", 0, 0, False),
    ],
)
def test_only_what_the_file_still_holds_is_given_back(
    library: str, permissions: str, anonymous: int, swapped: int, given_back: bool
) -> None:
    def mapping(place: str, path: str, own: int, swap: int) -> str:
        return (
            f"{place} {permissions} 0 fe:00 77  {path}\nRss: 40 kB\nAnonymous: {own} kB\nSwap: {swap} kB\nVmFlags: mr\n"
        )

    smaps = mapping("1000-3000", library, anonymous, swapped) + mapping("5000-6000", "", 0, 0)
    assert libraries._clean_mappings(smaps) == ([(0x1000, 0x2000)] if given_back else [])
