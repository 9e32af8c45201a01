"""Local training: every peer learns from its own shard alone, the floor that every method has to beat."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from peer.methods.base import Method, Notes
from transport.layout import Field

if TYPE_CHECKING:
    from peer.peer import Peer


class Local(Method):
    summary = "each peer learns from its own shard; nothing is exchanged"

    def fields(self, model: nn.Module, classes: int, dtype: str) -> tuple[Field, ...]:
        return ()

    def run_round(self, peer: Peer) -> Notes:
        return {"loss": train(peer)}


def train(peer: Peer, step: str = "") -> float:
    """Train on the peer's own labels for this round's epochs; returns the mean loss."""
    return descend(peer, peer.model, (functional.cross_entropy(peer.model(x), y) for x, y in peer.batches(step)))


def descend(peer: Peer, model: nn.Module, losses: Iterable[Tensor]) -> float:
    """Take one step down each of a model's losses, with a fresh optimizer; returns their mean.

    A loss is asked for only when the step before it is done.
    """
    with peer.timing("train"):
        optimizer = peer.optimizer(model)
        model.train()
        seen = []
        for loss in losses:
            optimizer.step(loss)
            seen.append(loss.detach())
        return float(torch.stack(seen).mean())
