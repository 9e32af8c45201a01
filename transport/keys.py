"""The keys of a swarm's peers: made by the supervisor for one run, in files that only their owner may read.

A key is never part of a command line, an environment or a log. The folder is private to the run and goes when it ends.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import zmq

_MEMBERS = "members"
_KEY_BYTES = 40  # of Z85, which is how libzmq writes 32 bytes


@dataclass(frozen=True)
class Keys:
    """A peer's own secret key, and every member's public one."""

    peer: int
    secret: bytes = field(repr=False)
    public: dict[int, bytes]


def make_keys(folder: Path, peers: Iterable[int]) -> None:
    """A key pair for each peer."""
    folder.mkdir(mode=0o700)
    members = []
    for peer in peers:
        public, secret = zmq.curve_keypair()
        _write(folder / f"{peer}.secret", secret)
        members.append(public)
    _write(folder / _MEMBERS, b"\n".join(members))


def read_keys(folder: Path, peer: int) -> Keys:
    """What one peer has to know. Raises `ValueError` for a file that is no key, or that others may read."""
    members = (folder / _MEMBERS).read_bytes().split(b"\n")
    for key in (secret := _read(folder / f"{peer}.secret"), *members):
        if len(key) != _KEY_BYTES:
            raise ValueError(f"{folder}: a key of {len(key)} characters, {_KEY_BYTES} are expected")
    if zmq.curve_public(secret) != members[peer]:
        raise ValueError(f"{folder}: the secret key of peer {peer} does not belong to its public one")
    return Keys(peer, secret, dict(enumerate(members)))


def _read(path: Path) -> bytes:
    if path.stat().st_mode & 0o077:
        raise ValueError(f"{path}: others than its owner may read it; its mode must be 0600")
    return path.read_bytes()


def _write(path: Path, key: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(key)
