"""Guarantees that the coordinator's models learn from what all peers' models say together on the public samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peer import snapshot
from peer.learner import fraction_true
from peer.methods.averaging import weighted_average
from peer.methods.base import Notes
from peer.methods.coordinated import needs_public_samples
from peer.methods.distillation import teaching_loss as distillation_loss  # KL(teacher || student)
from peer.methods.fedavg import ModelExchange
from peer.methods.fedmd import consensus
from peer.methods.local import descend, train
from peer.methods.public import Lesson, PublicTeaching, follow
from topology.errors import TopologyError

if TYPE_CHECKING:
    from peer.peer import Peer
    from peer.plan import Plan

__all__ = ["FedDf", "FedDfLogits", "distillation_loss", "teacher"]


def teacher(logits: Tensor) -> Tensor:
    """softmax of the mean logits (U, C) of the peers' logits (K, U, C) (FedDF, Lin et al. 2020, Algorithm 1).

    Errors are those of `consensus`.
    """
    return consensus(logits).softmax(-1)


class FedDf(ModelExchange):
    """One student an architecture at the coordinator: the mean of its clients' weights, distilled from all clients."""

    summary = "the coordinator distils all clients' models into one model for each architecture (FedDF)"

    def check(self, plan: Plan) -> None:
        super().check(plan)
        needs_public_samples(plan)
        models = sorted({plan.facts[k].label for k in plan.clients})
        own = plan.facts[plan.topology.coordinator or 0].label
        if own not in models:
            raise TopologyError(
                f"[[peer]] {plan.coordinator}: the coordinator's model is what FedDF is judged by, and no client has a "
                f"{own}. Give it one of theirs: {', '.join(models)}"
            )

    def coordinate(self, peer: Peer) -> Notes:
        weights, logits = {}, {}
        for arrival in peer.gather():
            weights[arrival.sender] = {name: tensor.clone() for name, tensor in arrival.weights.items()}
            with peer.timing("teachers"):
                logits[arrival.sender] = peer.predict_public(peer.teacher(arrival))
        clients, notes = sorted(weights), {}
        labels = {k: peer.plan.facts[k].label for k in peer.plan.clients}
        target = teacher(torch.stack([logits[k] for k in clients])) if clients else None
        for label in sorted(set(labels.values())):
            student, group = peer.student(label), [k for k in clients if labels[k] == label]
            if group and target is not None:
                sizes = [float(len(peer.plan.shards[k].train)) for k in group]
                snapshot.load(student, weighted_average([weights[k] for k in group], sizes))
                notes[f"distillation_loss {label}"] = descend(
                    peer,
                    student,
                    (
                        distillation_loss(target[positions], student(x))
                        for x, positions in peer.public_batches(f"distil {label}")
                    ),
                )
            if peer.is_last_round:
                chosen = peer.predict_test(student).argmax(1)
                notes[f"global_accuracy {label}"] = fraction_true(chosen == peer.test_labels)
        snapshot.load(peer.model, snapshot.weights(peer.student(peer.plan.facts[peer.id].label)))
        peer.send({k: snapshot.named(peer.student(labels[k])) for k in peer.receivers})
        return notes


class FedDfLogits(PublicTeaching):
    """FedDF's teacher in FedCC's protocol: logits travel instead of models."""

    summary = "clients follow the softmax of their mean logits on public samples, then fit their shard"

    def improve(self, peer: Peer, teacher: Tensor | None) -> dict[str, float]:
        followed = {} if teacher is None else follow(peer, teacher, distillation_loss)
        return followed | {"loss": train(peer, "fit")}

    def combine(self, predictions: Tensor, classes: int) -> Lesson:
        target = teacher(predictions)
        return Lesson(target, target.argmax(1), {})
