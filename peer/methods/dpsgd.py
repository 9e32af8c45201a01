"""Guarantees a weighted average of parameters: the same bits for the same peers in the same order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peer import snapshot
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
    oneself included. Where they add up to 0 there is nothing to mix, and the peer keeps its own.
    Added up in float64 in the given order and cast back to each tensor's dtype, in new tensors.
    Raises ValueError for a negative weight and, naming the tensor, for another name, shape or kind of number.
    """
    weights = [own_weight, *(weight for weight, _ in neighbors)]
    if not all(weight >= 0 for weight in weights):
        raise ValueError(f"mixing weights are {weights} (one's own first); none may be below 0")
    for _, theirs in neighbors:
        _check_alike(own, theirs)
    total = sum(weights)
    if total == 0:
        return {name: tensor.detach().clone() for name, tensor in own.items()}
    shares = [weight / total for weight in weights]
    mixed = {}
    for name, tensor in own.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{name!r} is {tensor.dtype}; only floating-point tensors can be averaged")
        average = torch.zeros_like(tensor, dtype=torch.float64)
        for share, model in zip(shares, [own, *(theirs for _, theirs in neighbors)], strict=True):
            average += share * model[name].detach().double()
        mixed[name] = average.to(tensor.dtype)
    return mixed


def _check_alike(own: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    for name in [*own, *theirs]:
        if name not in own or name not in theirs or own[name].shape != theirs[name].shape:
            mine = tuple(own[name].shape) if name in own else "absent"
            other = tuple(theirs[name].shape) if name in theirs else "absent"
            raise ValueError(
                f"{name!r} is {mine} here and {other} at a neighbor; D-PSGD averages parameters one by one, "
                "so all its peers need the same model"
            )


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
