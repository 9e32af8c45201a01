"""Guarantees that a peer counts in the common model by its number of samples."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from peer.methods.averaging import weighted_average


def average(models: Sequence[Mapping[str, Tensor]], sizes: Sequence[int]) -> dict[str, Tensor]:
    """w <- sum over k of (n_k / n) w_k (FedAvg, McMahan et al. 2017, Algorithm 1, the server's step).

    `models` are the floating parameters and buffers of the peers that are present, in peer order, batch norm's
    running statistics among them; `sizes` n_k are their numbers of training samples, and n is the sum of these.
    Arithmetic and errors are those of `weighted_average`.
    """
    return weighted_average(models, sizes)
