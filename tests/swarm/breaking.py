"""Methods that break on purpose, for a topology file to name."""

import os
from pathlib import Path

import torch

from peer.methods.base import Notes
from peer.methods.crad import Crad
from peer.methods.uniform import Uniform
from peer.peer import Peer

_touched = os.environ.get("CUDA_TOUCHED_BY")
if _touched:
    _initialize = torch.cuda._lazy_init

    def _note_and_initialize() -> None:
        with Path(str(_touched)).open("a") as file:
            file.write(f"{os.getpid()}\n")
        _initialize()

    torch.cuda._lazy_init = _note_and_initialize


class OneRaises(Uniform):
    """Peer 1 raises in round 2. Every peer notes what it finds of CUDA."""

    summary = "peer 1 raises in round 2"

    def run_round(self, peer: Peer) -> dict[str, float]:
        if (peer.id, peer.round) == (1, 2):
            raise RuntimeError("peer 1 raises in round 2, as it was told to, in a line that is longer than a terminal")
        initialized = {"cuda_initialized": float(torch.cuda.is_initialized())}
        bad_fork = {"bad_fork": float(torch.cuda._is_in_bad_fork())}
        return super().run_round(peer) | initialized | bad_fork


class AllRaise(Uniform):
    """Nobody gets through a round."""

    summary = "every peer raises in round 1"

    def run_round(self, peer: Peer) -> dict[str, float]:
        raise ArithmeticError(f"peer {peer.id} raises in round 1")


class OneCrashes(Uniform):
    """Peer 1's process breaks down in round 2, without a chance to say so."""

    summary = "peer 1 crashes in round 2"

    def run_round(self, peer: Peer) -> dict[str, float]:
        if (peer.id, peer.round) == (1, 2):
            os.abort()
        return super().run_round(peer)


class OneBoasts(Crad):
    """Peer 1 says from round 2 on that it is right more often than always."""

    summary = "peer 1 shares impossible statistics from round 2 on"

    def run_round(self, peer: Peer) -> Notes:
        if peer.id == 1 and peer.round > 1:
            true = peer.statistics()
            peer.statistics = lambda: true | {"a": true["a"] + 2}  # type: ignore[method-assign]
        return super().run_round(peer)
