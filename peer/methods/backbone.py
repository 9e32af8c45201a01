"""The round that CRAD and its variants share: snapshots out, teachers in, distillation on the peer's own shard.

CRAD: Class-wise Reliability-Aware Distillation for Decentralized Heterogeneous Federated Learning, Algorithm 1.
What differs between the variants is the target alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field
from torch import Tensor

from peer.methods.base import Settings
from peer.methods.distillation import soften, student_loss

if TYPE_CHECKING:
    from peer.peer import Peer

Evidence = tuple[Tensor, Tensor]
Target = Callable[[Tensor, Mapping[int, Evidence], Tensor], Tensor]
"""From teacher probabilities (J, B, C), each teacher's n and a (C,) in the same order, and the student's own
probabilities (B, C) to the target (B, C)."""


class DistillationSettings(Settings):
    """What every distilling method can be told."""

    distillation_weight: Annotated[float, Field(ge=0, le=1)] = 0.7  # lambda of Eq. 9; the labels have the rest
    temperature: Annotated[float, Field(gt=0)] = 3.0  # T of Eqs. 2 and 10
    warmup_rounds: Annotated[int, Field(ge=0)] = 0  # rounds at the start in which lambda is 0


def distil(peer: Peer, settings: DistillationSettings, target: Target, *, with_statistics: bool) -> dict[str, float]:
    """One round of one peer; returns its mean loss."""
    peer.share(**(peer.statistics() if with_statistics else {}))

    # A teacher is run on all of the round's batches as it arrives, and only its probabilities are kept: memory
    # holds one teacher however many neighbors there are, and the next snapshot travels while this one answers.
    batches = peer.batches()
    answers: dict[int, list[Tensor]] = {}
    evidence: dict[int, Evidence] = {}
    for arrival in peer.gather():
        with peer.timing("teachers"), torch.no_grad():
            teacher = peer.teacher(arrival)
            answer = [soften(teacher(x), settings.temperature) for x, _ in batches]  # Eq. 2
            if not all(bool(q.isfinite().all()) for q in answer):
                peer.refuse(arrival.sender, "its snapshot gives probabilities that are not finite")
                continue
        if with_statistics:
            evidence[arrival.sender] = arrival.statistics()
        answers[arrival.sender] = answer

    teachers = sorted(answers)  # peer order: sums do not depend on who was first
    evidence = {j: evidence[j] for j in teachers} if with_statistics else {}
    weight = 0.0 if peer.round <= settings.warmup_rounds else settings.distillation_weight
    with peer.timing("train"):
        optimizer = peer.optimizer()
        peer.model.train()
        losses = []
        for b, (x, y) in enumerate(batches):
            z = peer.model(x)
            qbar = None
            if teachers and weight > 0:
                q = torch.stack([answers[j][b] for j in teachers])
                qbar = target(q, evidence, soften(z.detach(), settings.temperature))
            loss = student_loss(z, y, qbar, distillation_weight=weight, temperature=settings.temperature)  # Eqs. 9, 10
            optimizer.step(loss)
            losses.append(loss.detach())
    return {"loss": float(torch.stack(losses).mean())}
