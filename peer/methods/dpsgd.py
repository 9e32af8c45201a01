"""Guarantees that neighbors' models are mixed by the swarm's mixing matrix, whoever of them is present."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from peer import snapshot
from peer.methods.averaging import weighted_average
from peer.methods.base import Method
from peer.methods.local import train
from topology.errors import TopologyError

if TYPE_CHECKING:
    from peer.peer import Peer
    from peer.plan import Plan


def mix(
    own: Mapping[str, Tensor], neighbors: Sequence[tuple[float, Mapping[str, Tensor]]], *, own_weight: float
) -> dict[str, Tensor]:
    """x_i <- W_ii x_i + sum over j of W_ij x_j (D-PSGD, Lian et al. 2017, Algorithm 1, the averaging step).

    `own_weight` is W_ii; `neighbors` are the pairs (W_ij, x_j) that are present, in peer order. All weights
    are divided by their sum, so what an absent neighbor would have weighed is shared among those present,
    oneself included. Where all of them are 0 there is nothing to mix, and the peer keeps its own.
    Arithmetic and errors are those of `weighted_average`; the first model is one's own.
    """
    weights = [own_weight, *(weight for weight, _ in neighbors)]
    if not any(weights):
        return weighted_average([own], [1.0])
    return weighted_average([own, *(theirs for _, theirs in neighbors)], weights)


class DPsgd(Method):
    """D-PSGD as decentralized tools run it: a local epoch, then one averaging step with the neighbors."""

    summary = "trains, then averages its weights with its neighbors' by the mixing matrix (D-PSGD)"
    common_start = True

    def check(self, plan: Plan) -> None:
        models = sorted({facts.label for facts in plan.facts})
        if len(models) > 1:
            raise TopologyError(
                f"models.pool: D-PSGD averages parameters one by one, so all peers need the same model; here are "
                f"{', '.join(models)}. Name one, or choose a method that distils"
            )

    def run_round(self, peer: Peer) -> dict[str, float]:
        loss = train(peer)
        peer.share()
        weights = peer.mixing_weights()
        arrived = {}
        for arrival in peer.gather():
            arrived[arrival.sender] = {name: tensor.clone() for name, tensor in arrival.weights.items()}
        with peer.timing("train"):
            own = snapshot.weights(peer.model)
            neighbors = [(weights[j], arrived[j]) for j in sorted(arrived)]
            snapshot.load(peer.model, mix(own, neighbors, own_weight=weights[peer.id]))
        return {"loss": loss}
