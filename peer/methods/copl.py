"""Guarantees pseudo-labels that clients agree on: of every class the same number, from whoever knows it reliably.

CoPL (FedCoPL, arXiv 2510.10100). Each client counts its reliable samples of each class, the coordinator turns
the counts into quotas, and each client labels its most confident samples up to its quota. Labels stay until the
next relabelling. Where the paper is silent we go by what its authors' code does; each such reading is an argument.

Shapes: K clients, n samples of one client, C classes.
    p (n, C)       probabilities of all samples of a client, from one and the same model
    counts (K, C)  how many reliable samples of each class each client has, zeros where it did not report
    quota (K, C)   how many samples of each class each client may label
Everything is computed in float64 or in whole numbers, and nothing carries a gradient. Rounds count from 1: what the
paper calls r is round - 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from peer.methods.distillation import check_choice
from topology.seeds import stream

ABSENT_CLASSES = ("explore", "zero")
ROUNDINGS = ("code", "paper")


# When


def relabels(round: int, every: int) -> bool:
    """Whether labels are made anew in this round: in the first, and `every` Q rounds after it."""
    return (round - 1) % every == 0


def learning_rate(base: float, round: int, epoch: int, *, every: int, epochs: int) -> float:
    """The rate in `epoch` e = 0..epochs-1: base (1 + cos(pi i / (Q E))) / 2, i = ((round - 1) mod Q) E + e.

    A cosine over the epochs between two relabellings, back at `base` after each.
    """
    done = (round - 1) % every * epochs + epoch
    return base * (1 + math.cos(math.pi * done / (every * epochs))) / 2


def joining(clients: Sequence[int], round: int, *, rate: float, seed: int) -> list[int]:
    """The max(1, round(rate * K)) clients that train in this round, in order; all of them relabel and evaluate."""
    if not 0 < rate <= 1:
        raise ValueError(f"joining rate is {rate}; it must be above 0 and at most 1")
    drawn = stream(seed, "joining", round).permutation(sorted(clients))
    return sorted(drawn[: max(1, int(rate * len(drawn) + 0.5))].tolist())


# CoPL: which samples get a label


def reliable_set(p: Tensor) -> Tensor:
    """Which samples (n,) bool are more confident than the median and of less entropy than the median, both strictly.

    Medians are the client's own, of an even number the middle of two. One sample, or all alike: none.
    Raises ValueError, here and wherever `p` is taken, for another shape and for numbers that are not finite.
    """
    p = checked(p)
    if len(p) == 0:
        return p.new_zeros(0, dtype=torch.bool)
    confidence, uncertainty = p.amax(1), entropy(p)
    return (confidence > confidence.quantile(0.5)) & (uncertainty < uncertainty.quantile(0.5))


def class_counts(p: Tensor) -> Tensor:
    """What a client reports: the number of its reliable samples predicted as each class, (C,) int32."""
    return torch.bincount(p[reliable_set(p)].argmax(1), minlength=p.shape[1]).to(torch.int32)


def allocate(
    counts: Tensor, *, train_size: int = 0, period: int = 0, absent_class: str = "explore", rounding: str = "code"
) -> Tensor:
    """Quotas (K, C) int64: each class gets the same budget, shared out by who has it reliably.

        q_kc = ceil(u_kc M / U_c),  M = ceil(U / C)  with  U_c = sum over k of u_kc,  U = sum over c of U_c

    `rounding="paper"` leaves M = U / C unrounded. A class with U_c = 0 is explored: each client may label
    ceil(n (j + 1) / (4 C K)) samples of it, n = `train_size` being all clients' samples together and j =
    `period` the number of relabellings before this one; `absent_class="zero"` gives nothing. Without any count
    (U = 0) all quotas are 0. Integer arithmetic: floating-point ceilings come out one too high.
    Raises ValueError for another shape, negative counts and unknown choices.
    """
    _check_counts(counts)
    counts = counts.long()
    return _shares(counts, counts.sum(0), counts, train_size, period, absent_class, rounding)


def allocate_late(
    own: Tensor,
    counts: Tensor,
    *,
    train_size: int = 0,
    period: int = 0,
    absent_class: str = "explore",
    rounding: str = "code",
) -> Tensor:
    """The quota (C,) int64 of a client that missed the relabelling and reports `own` (C,) within the period.

    q_c = ceil(u_c M / (U_c + u_c)), M and U_c from the `counts` (K, C) that were in time, its own row 0 there. The
    others' quotas stay. The rest is as in `allocate`.
    """
    _check_counts(counts)
    _check_counts(own[None])
    own, counts = own.long(), counts.long()
    return _shares(own[None], counts.sum(0) + own, counts, train_size, period, absent_class, rounding)[0]


def select(p: Tensor, quota: Tensor) -> tuple[Tensor, Tensor]:
    """The samples a client labels and their labels, int64 each, in class order, most confident first.

    Of the samples predicted as class c, reliable or not, the quota[c] most confident, or all there are;
    among equals the lower index. With the same quota for every class this is FPL (Menghini et al. 2023).
    """
    p = checked(p)
    if quota.shape != p.shape[1:] or (quota < 0).any():
        raise ValueError(f"the quota is {quota.tolist()}; it must hold {p.shape[1]} numbers (classes) of 0 or more")
    confidence, predicted = p.max(1)  # the first of equals
    order = confidence.argsort(descending=True, stable=True)
    members = [order[predicted[order] == label][:most] for label, most in enumerate(quota.tolist())]
    chosen = torch.cat(members)
    return chosen, predicted[chosen]


def remaining(size: int, selected: Tensor) -> Tensor:
    """Which of a client's samples (n,) bool were not selected."""
    rest = torch.ones(size, dtype=torch.bool, device=selected.device)
    rest[selected] = False
    return rest


# Parts


def checked(p: Tensor) -> Tensor:
    """Probabilities p (n, C) in float64, detached. Raises ValueError for another shape and for infinite or nan."""
    if p.dim() != 2 or p.shape[1] == 0 or not p.isfinite().all():
        raise ValueError(f"p has shape {tuple(p.shape)}; it must be (samples, classes), and all of it finite")
    return p.detach().double()


def _check_counts(counts: Tensor) -> None:
    if counts.dim() != 2 or counts.is_floating_point() or (counts < 0).any():
        raise ValueError(
            f"counts have shape {tuple(counts.shape)} and are {counts.dtype}; they must be (clients, classes), "
            "whole numbers of 0 or more"
        )


def entropy(p: Tensor) -> Tensor:
    """Shannon entropy (n,) of each row of p (n, C) in nats, with 0 ln 0 = 0."""
    terms: Tensor = torch.special.entr(p)
    return terms.sum(1)


def _shares(
    claims: Tensor,
    totals: Tensor,
    counts: Tensor,
    train_size: int,
    period: int,
    absent_class: str,
    rounding: str,
) -> Tensor:
    """What each of the claims (k, C) gets of a budget that follows from `counts`, by their part in `totals` (C,)."""
    check_choice("absent_class", absent_class, ABSENT_CLASSES)
    check_choice("rounding", rounding, ROUNDINGS)
    clients, classes = counts.shape
    everything = int(counts.sum())
    if everything == 0:
        return torch.zeros_like(claims)
    # -(-a // b) is a / b rounded up
    budget, parts = (-(-everything // classes), 1) if rounding == "code" else (everything, classes)
    shared = -(-claims * budget // (parts * totals.clamp(min=1)))
    explored = -(-train_size * (period + 1) // (4 * classes * clients)) if absent_class == "explore" else 0
    return shared.where(totals > 0, explored)
