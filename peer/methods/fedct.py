"""Guarantees that peers exchange nothing but hard labels of the public samples, and follow the majority."""

import torch
from torch import Tensor


def vote(labels: Tensor, classes: int) -> Tensor:
    """The label (U,) int64 that most of the K peers gave each public sample; the lowest id among equals.

    FedCT (Abourayya et al. 2023), its consensus by majority. `labels` (K, U) are class ids of any integer type.
    Raises ValueError for another shape, no peer, or, naming the peer, an id outside 0..classes-1.
    """
    if labels.dim() != 2 or len(labels) == 0 or labels.is_floating_point():
        raise ValueError(
            f"the labels are {labels.dtype} of shape {tuple(labels.shape)}; they must be class ids (peers, samples), "
            "with at least one peer"
        )
    ids = labels.long()
    strange = (ids < 0) | (ids >= classes)
    if strange.any():
        peer = int(strange.any(1).nonzero()[0])
        raise ValueError(
            f"peer {peer} of {len(ids)} names class {int(ids[peer][strange[peer]][0])}; ids lie in 0..{classes - 1}"
        )
    votes = torch.zeros(ids.shape[1], classes, device=ids.device).scatter_add_(1, ids.T, torch.ones_like(ids.T).float())
    return votes.argmax(1)  # the first of equals
