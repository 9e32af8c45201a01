"""Guarantees that a peer counts in the common model by its number of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from peer import snapshot
from peer.methods.averaging import needs_one_architecture, weighted_average
from peer.methods.base import Accuracies, Notes
from peer.methods.coordinated import Coordinated, check_losses
from peer.methods.local import train
from transport.layout import Layout

if TYPE_CHECKING:
    from peer.peer import Peer
    from peer.plan import Plan


def average(models: Sequence[Mapping[str, Tensor]], sizes: Sequence[int]) -> dict[str, Tensor]:
    """w <- sum over k of (n_k / n) w_k (FedAvg, McMahan et al. 2017, Algorithm 1, the server's step).

    `models` are the floating parameters and buffers of the peers that are present, in peer order, batch norm's
    running statistics among them; `sizes` n_k are their numbers of training samples, and n is the sum of these.
    Arithmetic and errors are those of `weighted_average`.
    """
    return weighted_average(models, sizes)


class ModelExchange(Coordinated):
    """Models go up after local training, and the coordinator's come back."""

    common_start = True

    def message(self, plan: Plan, sender: int, receiver: int, round: int, exchange: int) -> Layout:
        client = receiver if sender == plan.coordinator else sender
        return plan.facts[client].message

    def learn(self, peer: Peer) -> Notes:
        notes = {"loss": train(peer)}
        check_losses(notes)
        peer.share()
        for arrival in peer.gather():
            peer.kept = {name: tensor.clone() for name, tensor in arrival.weights.items()}
        return notes

    def evaluate(self, peer: Peer, *, globally: bool) -> Accuracies:
        # A client is measured as it has learnt; only then does what came back take its model's place.
        measured = super().evaluate(peer, globally=globally)
        if peer.kept:
            snapshot.load(peer.model, peer.kept)
            peer.kept = {}
            peer.changed()
        return measured


class FedAvg(ModelExchange):
    """FedAvg, Algorithm 1: local epochs, then the average of all clients' models by their samples."""

    summary = "the coordinator averages all clients' models by their number of samples (FedAvg)"

    def check(self, plan: Plan) -> None:
        super().check(plan)
        needs_one_architecture(plan, "FedAvg")

    def coordinate(self, peer: Peer) -> Notes:
        arrived = {}
        for arrival in peer.gather():
            arrived[arrival.sender] = {name: tensor.clone() for name, tensor in arrival.weights.items()}
            if peer.is_last_round and arrival.sender == min(peer.senders):
                with peer.timing("evaluate"):
                    peer.predict_test(peer.teacher(arrival), features_as="client")
        clients = sorted(arrived)  # peer order: sums do not depend on who was first
        if clients:
            with peer.timing("train"):
                sizes = [len(peer.plan.shards[k].train) for k in clients]
                snapshot.load(peer.model, average([arrived[k] for k in clients], sizes))
        if peer.is_last_round:
            with peer.timing("evaluate"):
                peer.predict_test(peer.model, features_as="together")
        peer.share()
        return {}
