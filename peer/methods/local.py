"""Local training: every peer learns from its own shard alone, the floor that every method has to beat."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from peer.methods.base import Method
from transport.layout import Field

if TYPE_CHECKING:
    from peer.peer import Peer


class Local(Method):
    summary = "each peer learns from its own shard; nothing is exchanged"

    def fields(self, model: nn.Module, classes: int, dtype: str) -> tuple[Field, ...]:
        return ()

    def run_round(self, peer: Peer) -> dict[str, float]:
        return {"loss": train(peer)}


def train(peer: Peer) -> float:
    """Train on the peer's own labels for this round's epochs; returns the mean loss."""
    with peer.timing("train"):
        optimizer = peer.optimizer()
        peer.model.train()
        losses = []
        for x, y in peer.batches():
            loss = functional.cross_entropy(peer.model(x), y)
            optimizer.step(loss)
            losses.append(loss.detach())
        return float(torch.stack(losses).mean())
