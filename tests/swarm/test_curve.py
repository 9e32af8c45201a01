"""A whole swarm with keys: the same bits, books that agree with the kernel, and keys that are nowhere to be seen."""

from pathlib import Path


def test_a_swarm_with_keys(start, run):
    shape = {"swarm": {"peers": 3, "rounds": 2}}
    running = start(transport={"security": "curve"}, peer=[{"id": 1, "host": "0.0.0.0"}], **shape)
    secrets = running.wait_for(lambda: _secrets(running.temporary))
    (folder,) = running.temporary.glob("swarm-*/keys")
    assert (folder.parent.stat().st_mode | folder.stat().st_mode) & 0o077 == 0
    running.wait_for(lambda: running.events("round"))
    shown = [Path(f"/proc/{pid}/{what}") for pid in running.processes() for what in ("cmdline", "environ")]
    told = b"".join(_read(path) for path in shown)
    ended = running.end()
    assert ended.status == 0, ended.output
    told += ended.output.encode() + b"".join(p.read_bytes() for p in ended.folder.rglob("*") if p.is_file())
    assert not [secret for secret in secrets if secret in told]
    connections = ended.events("connection")
    assert len(connections) == 12 and all(one["verified"] is True for one in connections)
    assert "0.0.0.0" in ended.events("started", 1)[0]["endpoint"]
    open_one = run(**shape)
    assert ended.snapshots() == open_one.snapshots()
    assert ended.summary["bytes"]["payload"] == open_one.summary["bytes"]["payload"]


def _secrets(temporary):
    found = [path.read_bytes() for path in temporary.glob("swarm-*/keys/*.secret")]
    return found if len(found) == 3 and all(len(secret) == 40 for secret in found) else []


def _read(path):
    try:
        return path.read_bytes()
    except OSError:  # it has ended
        return b""
