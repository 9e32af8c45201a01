"""Guarantees the terms of the methods FedBST is compared with, as pure functions.

CPL's candidate labels (Zhang et al. 2024), FedOTP's transport between patches and two prompts (Li et al. 2024,
called FedOPT in FedCoPL's paper), PromptProx's proximal term, and pFedPrompt's local attention, whose published
formula we could not read: ours is the usual cache of features.

Shapes: n samples of one client, C classes, d features, M patches, N text prompts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from peer.methods.copl import checked


def candidate_sets(p: Tensor, *, q: float = 0.6, beta: float = 0.9) -> Tensor:
    """The labels (n, C) bool that each sample of p (n, C) may have (CPL). A sample may be left with none.

    Within a sample: its most probable classes up to and including the one whose running sum exceeds the
    `q`-quantile of the client's confidences. Across samples: p at least the `beta`-quantile of its class.
    """
    p = checked(p)
    if len(p) == 0:
        return p.bool()
    ranked, order = p.sort(dim=1, descending=True, stable=True)
    before = ranked.cumsum(1) - ranked
    within = torch.zeros_like(p, dtype=torch.bool).scatter(1, order, before <= p.amax(1).quantile(q))
    return within & (p >= p.quantile(beta, dim=0))


def admitted(p: Tensor, candidates: Tensor, *, most: int = 16) -> Tensor:
    """The samples (k,) int64 that CPL trains on, most confident first: at most `most` for each class.

    A sample counts for its most probable candidate class that is not full; without one it is left out.
    """
    p = checked(p)
    room = [most] * p.shape[1]
    found = []
    for sample in p.amax(1).argsort(descending=True, stable=True).tolist():
        ranked = p[sample].argsort(descending=True, stable=True).tolist()
        label = next((label for label in ranked if candidates[sample, label] and room[label]), None)
        if label is not None:
            room[label] -= 1
            found.append(sample)
    return torch.tensor(found, dtype=torch.int64, device=p.device)


def candidate_loss(logits: Tensor, candidates: Tensor) -> Tensor:
    """Mean over the samples of -ln(sum of p_c over their candidate labels): a scalar in nats (CPL).

    Raises ValueError for a sample without candidates.
    """
    if not candidates.any(1).all():
        raise ValueError("a sample has no candidate label; leave it out of the batch")
    return -logits.log_softmax(1).masked_fill(~candidates, -torch.inf).logsumexp(1).mean()


@torch.no_grad()
def transport(
    similarity: Tensor, *, mass: float = 0.8, epsilon: float = 0.1, tolerance: float = 1e-3, most: int = 100
) -> Tensor:
    """FedOTP's partial transport plan (..., M, N) between patches and prompts, without gradient.

    Sinkhorn with the kernel exp(-(1 - S) / epsilon): every prompt receives mass / N, no patch gives more than 1 / M.
    It ends when the mean change of the prompts' scaling is below `tolerance`, or after `most` steps.
    """
    patches, prompts = similarity.shape[-2:]
    kernel = ((similarity - 1) / epsilon).exp()
    given = torch.ones_like(similarity[..., :1])
    received = torch.ones_like(similarity[..., :1, :])
    for _ in range(most):
        previous = received
        given = (1 / patches / (kernel * received).sum(-1, keepdim=True)).clamp(max=1)
        received = mass / prompts / (kernel * given).sum(-2, keepdim=True)
        if (received - previous).abs().mean() < tolerance:
            break
    return given * kernel * received


def proximal(own: Tensor, shared: Tensor, *, mu: float = 0.5) -> Tensor:
    """PromptProx's term: (mu / 2) |own - shared|^2, a scalar. `own` is the parameter itself, never a detached copy."""
    return mu / 2 * (own - shared.detach()).square().sum()


def local_attention(
    features: Tensor, keys: Tensor, values: Tensor, *, weight: float = 1.0, sharpness: float = 5.5
) -> Tensor:
    """What a client's own labelled features add to its logits (n, C): w sum over i of exp(-b (1 - z . F_i)) L_i.

    `features` z (n, d) and `keys` F (k, d) are of unit length, `values` L (k, C) one-hot labels. Without keys: 0.
    """
    return weight * ((features @ keys.T - 1) * sharpness).exp() @ values
