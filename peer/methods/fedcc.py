"""Guarantees that a peer is followed on a public sample as far as it says the sample is of a class it knows.

FedCC: Towards Addressing Label Distribution Skews in Distillation-Based Federated Learning; equation numbers are
the paper's. Models have C + 1 outputs, the last of them "unknown". Each peer learns its own labels and, on public
samples without labels, either the class among its majority ones that it sees there or "unknown" (Eqs. 4 to 10);
the coordinator weighs each peer's answer by what it did not call unknown (Eq. 11); all learn from that (Eq. 2).

Shapes: K peers, U public samples, B samples of a mini-batch, C classes, C >= 2.
    probe (C,)           p, what the model says of an image without content, as probabilities of the C classes
    predictions (K, U, C+1)  what the peers upload: probabilities, "unknown" last
    teacher (U, C)       what comes back from the coordinator
All but the losses is computed in float64 and carries no gradient. Entropies are in nats.
"""

from __future__ import annotations

from functools import partial
from math import log
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from peer.learner import fraction_true
from peer.methods.base import Notes, Settings
from peer.methods.distillation import check_choice, teaching_loss
from peer.methods.local import train
from peer.methods.public import Lesson, PublicTeaching, follow
from peer.methods.ssl import refine
from peer.methods.ssl import refine_loss as refine_loss  # Eq. 4
from transport import layout as wire

if TYPE_CHECKING:
    from peer.data.sets import DataSet
    from peer.peer import Peer

SMOOTHING = 1e-3  # delta of Eq. 9
MAJORITY_THRESHOLD = 0.02  # a class with a larger share is one of the majority
ROW_SLACK = 1e-3  # how far from 1 an uploaded row may add up to
NO_MASS = 1e-30  # below this all peers are certain of "unknown"

SPACES = ("padded", "restricted")


class Teacher(NamedTuple):
    """The coordinator's answer and how it came about."""

    target: Tensor  # (U, C) in the predictions' dtype, rows add up to 1
    valid: Tensor  # (U,) bool; a row that is not is uniform, and is left out of Eq. 2
    weights: Tensor  # (K, U) float64, mu of Eq. 11
    dropped: Tensor  # (K,) int64, unusable rows of each peer


def known(logits: Tensor) -> Tensor:
    """Probabilities (..., C) over the known classes alone: softmax of logits (..., C+1) without the last."""
    return logits[..., :-1].softmax(-1)


def entropy(p: Tensor) -> Tensor:
    """Entropy (...) of probabilities (..., C), in nats; 0 log 0 counts as 0."""
    terms: Tensor = torch.special.entr(p)
    return terms.sum(-1)


def majority(p: Tensor, threshold: float = MAJORITY_THRESHOLD) -> Tensor:
    """Which classes (C,) bool have a share p (C,) strictly above `threshold`: C_J of the paper."""
    return p > threshold


def trust_weights(
    probe: Tensor,
    *,
    smoothing: float = SMOOTHING,
    majority_threshold: float = MAJORITY_THRESHOLD,
    prior: Tensor | None = None,
) -> tuple[Tensor, float]:
    """w_l, the entropy of the smoothed probe, a float64 scalar above 0, and w_u = log(C - |C_J| + 1) (Eq. 9).

    The majority classes are read from the probe, or from the peer's label shares `prior` (C,) if given.
    Raises ValueError for wrong shapes, or a smoothing outside 0..1, both excluded.
    """
    if probe.dim() != 1 or len(probe) < 2 or (prior is not None and prior.shape != probe.shape):
        raise ValueError(
            f"the probe has shape {tuple(probe.shape)} and the prior {None if prior is None else tuple(prior.shape)}; "
            "both must be (classes,), with at least 2 classes"
        )
    if not 0 < smoothing < 1:
        raise ValueError(f"smoothing is {smoothing}; it must lie between 0 and 1")
    classes = len(probe)
    smoothed = (1 - smoothing) * probe.detach().double() + smoothing / classes
    owned = int(majority(probe if prior is None else prior, majority_threshold).sum())
    return entropy(smoothed), log(classes - owned + 1)


def alpha(
    probe: Tensor,
    entropy: Tensor,
    *,
    smoothing: float = SMOOTHING,
    majority_threshold: float = MAJORITY_THRESHOLD,
    prior: Tensor | None = None,
) -> Tensor:
    """How far (U,), in 0..1, a public sample is taken to be of a majority class (Eq. 10).

        alpha = (w_l - w_x) / (w_l + w_u) with w_x = min(w_l, entropy)

    `entropy` (U,) is that of the model's probabilities of the known classes. In float64; `prior` and errors as
    `trust_weights`.
    """
    w_l, w_u = trust_weights(probe, smoothing=smoothing, majority_threshold=majority_threshold, prior=prior)
    return (w_l - entropy.detach().double()).clamp(min=0) / (w_l + w_u)


def pseudo_labels(
    public_logits: Tensor,
    probe_logits: Tensor,
    *,
    smoothing: float = SMOOTHING,
    majority_threshold: float = MAJORITY_THRESHOLD,
    prior: Tensor | None = None,
) -> Tensor:
    """Soft labels (U, C+1) of the public samples: alpha on the likeliest majority class, 1 - alpha on unknown (Eq. 8).

    From logits (U, C+1) of the samples and (C+1,) of the probe image, in the dtype of the former. Without any
    majority class, all are candidates. `prior` as in `trust_weights`.
    Raises ValueError for wrong shapes, a smoothing outside 0..1, or logits that are not finite.
    """
    if public_logits.dim() != 2 or probe_logits.shape != public_logits.shape[1:]:
        raise ValueError(
            f"public_logits have shape {tuple(public_logits.shape)}, probe_logits {tuple(probe_logits.shape)}; they "
            "must be (samples, classes + 1) and (classes + 1,)"
        )
    if not (public_logits.isfinite().all() and probe_logits.isfinite().all()):
        raise ValueError("the model gives logits that are not finite: it has diverged; lower its learning rate")
    logits, probe = public_logits.detach().double(), known(probe_logits.detach().double())
    trust = alpha(
        probe, entropy(known(logits)), smoothing=smoothing, majority_threshold=majority_threshold, prior=prior
    )
    owned = majority(probe if prior is None else prior.to(probe.device), majority_threshold)
    candidates = owned if owned.any() else torch.ones_like(owned)
    best = logits[:, :-1].masked_fill(~candidates, -torch.inf).argmax(1)  # m of Eq. 5
    labels = torch.zeros_like(logits)
    labels[:, -1] = 1 - trust
    return labels.scatter_(1, best[:, None], trust[:, None]).to(public_logits.dtype)


def teach(predictions: Tensor) -> Teacher:
    """What the coordinator sends back, from the peers' predictions (K, U, C+1), with its parts (Eqs. 1 and 11).

        s_k = sum over c of y_k,c      mu_k = s_k / sum over j of s_j      target_c ~ sum over k of mu_k y_k,c

    over the known classes c. s_k is not taken from 1 - y_u, which rounds to 0 where y_u is nearly 1. A peer's row
    that is not finite, negative somewhere or does not add up to 1 is dropped and counted. Where no row is usable,
    or all peers are certain of "unknown", the target is uniform and not valid.
    Raises ValueError for another shape.
    """
    _check_peers(predictions)
    answers = predictions.detach().double()
    usable = (answers >= 0).all(2) & ((answers.sum(2) - 1).abs() <= ROW_SLACK)  # neither holds for NaN
    answers = torch.where(usable[:, :, None], answers[:, :, :-1], 0.0)
    mass = answers.sum(2)  # s of Eq. 11
    valid = mass.sum(0) > NO_MASS
    weights = torch.where(valid, mass, usable.double())
    weights = weights / weights.sum(0).clamp(min=torch.finfo(torch.float64).tiny)
    raw = (weights[:, :, None] * answers).sum(0)
    target = torch.where(valid[:, None], raw / raw.sum(1, keepdim=True), 1 / raw.shape[1])
    return Teacher(target.to(predictions.dtype), valid, weights, (~usable).sum(1))


def aggregate(predictions: Tensor) -> tuple[Tensor, Tensor]:
    """The target (U, C) of `teach` and which of its rows are valid (U,)."""
    return teach(predictions)[:2]


def scores(logits: Tensor) -> Tensor:
    """Log of Eq. 11's sum over the peers (B, C), float64, up to a number a row, from their logits (K, B, C+1).

        score_c = LSE over k of (a_k + f_k,c - LSE_k),  a_k = LSE of the known f_k - LSE_k,  LSE_k of all C+1

    softmax of it is `aggregate`'s target of softmax(logits), but it decides even where all are certain of unknown.
    Raises ValueError for another shape and, naming the peer, for logits that are not finite.
    """
    _check_peers(logits)
    logits = logits.detach().double()
    finite = logits.isfinite().flatten(1).all(1)
    if not finite.all():
        peer = int((~finite).nonzero()[0])
        raise ValueError(f"peer {peer} of {len(logits)} gives logits that are not finite: its model has diverged")
    shares = logits.log_softmax(2)[:, :, :-1]
    return (shares.logsumexp(2, keepdim=True) + shares).logsumexp(0)


def infer(logits: Tensor) -> Tensor:
    """The class (B,) that the peers' models choose together, the lowest id among equals; see `scores`."""
    return scores(logits).argmax(1)


def sync_loss(teacher: Tensor, logits: Tensor, *, space: str = "padded") -> Tensor:
    """Mean over the given samples of KL(teacher || model), a scalar in nats (Eq. 2).

    `teacher` (B, C) is a constant, `logits` (B, C+1) carry the gradient; leave out rows that are not valid.
    "padded": the model's C + 1 probabilities, the teacher's of unknown being 0, so that unknown is unlearnt;
    "restricted": those of the known classes alone, and unknown keeps its logit.
    Raises ValueError for another shape, an unknown space, or without a sample.
    """
    check_choice("space", space, SPACES)
    if space == "padded":
        return teaching_loss(F.pad(teacher, (0, 1)), logits)
    return teaching_loss(teacher, logits[..., :-1])


def _check_peers(answers: Tensor) -> None:
    if answers.dim() != 3 or answers.shape[2] < 3:
        raise ValueError(
            f"the peers' answers have shape {tuple(answers.shape)}; they must be (peers, samples, classes + 1), with "
            "at least 2 classes"
        )


class FedCcSettings(Settings):
    """The keys of FedCC."""

    unlabelled_weight: Annotated[float, Field(ge=0)] = 0.2  # lambda of Eq. 4
    smoothing: Annotated[float, Field(gt=0, lt=1)] = SMOOTHING
    majority_threshold: Annotated[float, Field(ge=0, lt=1)] = MAJORITY_THRESHOLD
    majority: Literal["probe", "label_prior"] = "probe"
    probe: Literal["ones", "white", "black", "mean"] = "ones"
    sync_space: Literal["padded", "restricted"] = "padded"


class FedCc(PublicTeaching):
    """Algorithm 1: a client's half in `improve` and `predict`, the coordinator's in `combine`."""

    summary = "clients share what they make of public samples and may say unknown; the coordinator weighs by it (FedCC)"
    settings_type = FedCcSettings
    settings: FedCcSettings
    unknown_class = True

    def answer(self, samples: int, classes: int, dtype: str) -> wire.Field:
        return wire.Field("predictions", dtype, (samples, classes + 1))

    def improve(self, peer: Peer, teacher: Tensor | None) -> Notes:
        how = self.settings
        losses = {} if teacher is None else follow(peer, teacher, partial(sync_loss, space=how.sync_space))  # Eq. 2
        losses["fit_loss"] = train(peer, "fit")  # theta_0

        with peer.timing("teachers"), torch.no_grad():  # once a round, then frozen
            public_logits = peer.predict_public(peer.model)
            probe_logits = peer.model(probe_image(peer.data, how.probe).to(peer.device))[0]
            prior = peer.label_counts / peer.label_counts.sum() if how.majority == "label_prior" else None
            pseudo = pseudo_labels(
                public_logits,
                probe_logits,
                smoothing=how.smoothing,
                majority_threshold=how.majority_threshold,
                prior=prior,
            )
        losses["loss"] = refine(peer, pseudo, how.unlabelled_weight)  # Eq. 4
        p = known(probe_logits.double())
        return losses | {
            "probe": p.tolist(),
            "majority_classes": float(majority(p if prior is None else prior, how.majority_threshold).sum()),
            "alpha": float((1 - pseudo[:, -1]).mean()),
        }

    def usable(self, predictions: Tensor) -> bool:
        return True  # `teach` drops what is not, row by row

    def predict(self, peer: Peer) -> Tensor:
        return peer.predict_public(peer.model).softmax(1)

    def combine(self, predictions: Tensor, classes: int) -> Lesson:
        found = teach(predictions)  # Eq. 11
        # A row without a teacher travels as zeros.
        target = torch.where(found.valid[:, None], found.target, 0.0)
        notes = {"valid": fraction_true(found.valid), "dropped": float(found.dropped.sum())}
        return Lesson(target, found.target.argmax(1), notes)

    def answer_together(self, logits: Tensor, classes: int) -> Tensor:
        return scores(logits)


def probe_image(data: DataSet, colour: str) -> Tensor:
    """An image (1, channels, height, width) without content, as it is fed to the model.

    "ones" is 1 after normalization, as CDMAD's code has it; "mean" 0; "white" and "black" are colours before it.
    """
    if colour in ("ones", "mean"):
        return torch.full((1, *data.shape), float(colour == "ones"))
    mean, std = (torch.tensor(moment).view(1, -1, 1, 1) for moment in (data.mean, data.std))
    return ((float(colour == "white") - mean) / std).expand(1, *data.shape)
