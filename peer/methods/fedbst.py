"""Guarantees FedBST's two additions to CoPL: ambiguous samples are kept from confidence, and prototypes help the text.

FedBST (arXiv 2610.30634) trains prompts of a frozen CLIP on images without labels. Which images get one is
CoPL's matter. A dual filter finds those that are ambiguous, and a loss on them (UACP) keeps their confidence
down. At prediction, visual prototypes of what a client reliably knows join the text. Where the paper is silent
the reading is ours, and an argument.

Shapes: n samples of one client, C classes, d features.
    p (n, C)  probabilities of all samples of a client, from one and the same model
Choices and prototypes are computed in float64; losses are differentiable, in float32 or float64 as the logits.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from peer.methods.base import Accuracies
from peer.methods.copl import allocate as allocate
from peer.methods.copl import checked, entropy, remaining
from peer.methods.copl import reliable_set as reliable_set
from peer.methods.copl import select as select
from peer.methods.distillation import check_choice, soften
from peer.methods.prompts import PromptLearning, PromptSettings, prompted
from peer.models import clip
from topology.seeds import stream

if TYPE_CHECKING:
    from peer.peer import Peer

SLACK = 1e-6  # the dual filter's bounds are inclusive, also for probabilities that were rounded to float32
NORM_MINIMUM = 1e-12  # shorter sums of unit features point nowhere: they have cancelled

INTERVALS = ("halfwidth", "threshold")
SIDES = ("above", "below")
UNITS = ("normalized", "nats")
SOURCES = ("reliable", "selected")


# UACP: which samples are ambiguous, and the loss


def dual_filter(
    p: Tensor,
    *,
    tau_con: float = 0.2,
    tau_ent: float = 0.5,
    interval: str = "halfwidth",
    entropy_side: str = "above",
    entropy_unit: str = "normalized",
) -> Tensor:
    """Which samples (n,) bool are ambiguous: of middling confidence, and uncertain. Bounds belong to it.

    `interval`: "halfwidth", |confidence - 1/2| <= tau_con; "threshold", tau_con <= confidence <= 1 - tau_con.
    The entropy, divided by ln C unless `entropy_unit` is "nats", is "above" or "below" tau_ent.
    Those that were selected are to be taken out: see `remaining`.
    """
    check_choice("interval", interval, INTERVALS)
    check_choice("entropy_side", entropy_side, SIDES)
    check_choice("entropy_unit", entropy_unit, UNITS)
    p = checked(p)
    half = tau_con if interval == "halfwidth" else 0.5 - tau_con
    middling = (p.amax(1) - 0.5).abs() <= half + SLACK
    uncertainty = entropy(p)
    if entropy_unit == "normalized":
        uncertainty = uncertainty / (math.log(p.shape[1]) or 1.0)  # of one class it is 0 already
    excess = uncertainty - tau_ent if entropy_side == "above" else tau_ent - uncertainty
    return middling & (excess >= -SLACK)


def uacp(logits: Tensor) -> Tensor:
    """Mean over the ambiguous samples of their highest probability, a scalar; 0, with gradient, when m = 0.

    Of the logits (m, C) one carries a positive gradient in each row, the first of the highest.
    """
    return soften(logits, 1).max(1).values.sum() / max(len(logits), 1)


def objective(logits: Tensor, labels: Tensor, ambiguous_logits: Tensor, *, weight: float = 0.001) -> Tensor:
    """L = CE(logits (B, C), labels (B,)) + weight * UACP(ambiguous_logits (m, C)), a scalar in nats.

    Raises ValueError without a labelled sample: UACP alone would drive a client to the uniform distribution.
    """
    if len(labels) == 0:
        raise ValueError("there is no labelled sample: a client that selected none does not train")
    return F.cross_entropy(logits, labels) + weight * uacp(ambiguous_logits)


def ambiguous_batch(order: Tensor, step: int, size: int) -> Tensor:
    """The ambiguous samples of a round's training step 0, 1, ...: min(size, m) of the shuffled `order` (m,), on and on.

    One such batch goes with each labelled batch; at the end of the list it wraps round.
    """
    size = min(size, len(order))
    return order[(step * size + torch.arange(size, device=order.device)) % max(len(order), 1)]


# Prototypes and prediction


def prototype_samples(
    p: Tensor, selected: Tensor, labels: Tensor, *, source: str = "reliable"
) -> tuple[Tensor, Tensor]:
    """The samples that make a client's prototypes, and their classes, int64 each.

    The reliable set under the current `p` with its predictions; the `selected` with their `labels` where
    nothing is reliable, or for `source="selected"`.
    """
    check_choice("source", source, SOURCES)
    chosen = reliable_set(p).nonzero()[:, 0]
    return (selected, labels) if source == "selected" or len(chosen) == 0 else (chosen, p[chosen].argmax(1))


def prototypes(features: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Unit length mean direction (C, d) of each class's features (n, d), and which classes (C,) bool have one.

    v_c = sum of x / |x| over the class, divided by its length. A class has none, and a row of zeros, without
    samples and where they cancel.
    """
    total = _class_sums(F.normalize(features.double(), dim=1), labels, classes)
    length = total.norm(dim=1)
    mask = length > NORM_MINIMUM
    return (total / length.where(mask, 1)[:, None] * mask[:, None]).to(features.dtype), mask


def ensemble(
    features: Tensor,
    text: Tensor,
    prototypes: Tensor,
    mask: Tensor,
    *,
    scale: float,
    alpha: float = 0.8,
    vis_scale: float | None = None,
) -> Tensor:
    """Class probabilities (n, C): alpha softmax(s z . t) + (1 - alpha) softmax over the masked of s z . v.

    `features` (n, d) and `text` (C, d) are brought to unit length first, as z and t; `prototypes` v (C, d) have it
    already, and `scale` s is CLIP's. Classes without a prototype get 0 in the second part; without any
    prototype the first is the answer. Raises ValueError for an alpha outside 0..1.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}; it must lie in 0..1")
    features, text = F.normalize(features, dim=1), F.normalize(text, dim=1)
    spoken = soften(scale * features @ text.T, 1)
    if not mask.any():
        return spoken
    seen = (scale if vis_scale is None else vis_scale) * features @ prototypes.T
    return alpha * spoken + (1 - alpha) * soften(seen.masked_fill(~mask, -torch.inf), 1)


def _class_sums(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    return features.new_zeros(classes, features.shape[1]).index_add(0, labels, features)


class FedBstSettings(PromptSettings):
    """The keys of FedBST; what its paper leaves open among them."""

    uacp_weight: Annotated[float, Field(ge=0)] = 0.001  # lambda
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.8  # of the text stream
    tau_con: Annotated[float, Field(ge=0, le=0.5)] = 0.2
    tau_ent: Annotated[float, Field(ge=0)] = 0.5
    interval: Literal["halfwidth", "threshold"] = "halfwidth"
    entropy_side: Literal["above", "below"] = "above"
    entropy_unit: Literal["normalized", "nats"] = "normalized"
    prototypes: Literal["reliable", "selected"] = "reliable"
    vis_scale: Annotated[float, Field(gt=0)] | None = None  # of the visual stream; CLIP's own where it is not given


class FedBst(PromptLearning):
    """CoPL's labels, both prompts trained, the visual one shared, and FedBST's two additions."""

    summary = "unlabelled clients learn prompts of a frozen CLIP: agreed labels, ambiguous samples, prototypes (FedBST)"
    settings_type: ClassVar[type[FedBstSettings]] = FedBstSettings
    settings: FedBstSettings

    def label(self, peer: Peer, p: Tensor) -> dict[str, float]:
        how, notes = self.settings, super().label(peer, p)
        filtered = dual_filter(
            p,
            tau_con=how.tau_con,
            tau_ent=how.tau_ent,
            interval=how.interval,
            entropy_side=how.entropy_side,
            entropy_unit=how.entropy_unit,
        )
        rest = remaining(len(p), peer.kept["selected"])
        peer.kept["ambiguous"] = (filtered & rest).nonzero()[:, 0]
        return notes | {
            "reliable": float(reliable_set(p).sum()),
            "ambiguous": float(len(peer.kept["ambiguous"])),
        }

    def train(self, peer: Peer) -> float:
        order = stream(peer.topology.swarm.seed, "ambiguous", peer.id, peer.round)
        shuffled = torch.from_numpy(order.permutation(len(peer.kept["ambiguous"])))
        peer.kept["ambiguous order"] = peer.kept["ambiguous"][shuffled]
        return super().train(peer)

    def loss(self, peer: Peer, samples: Tensor, labels: Tensor, step: int) -> Tensor:
        weight = self.settings.uacp_weight
        waist = ambiguous_batch(peer.kept["ambiguous order"], step, peer.topology.training.batch_size)
        seen = torch.cat([samples, waist]) if weight > 0 else samples  # in one pass, which is quicker than two
        logits = clip.logits(self.features(peer, "train", seen), self.texts(peer), prompted(peer).backbone.scale)
        return objective(logits[: len(samples)], labels, logits[len(samples) :], weight=weight)

    def evaluate(self, peer: Peer, *, globally: bool) -> Accuracies:
        if globally and not peer.is_coordinator and self.settings.alpha < 1:
            with peer.timing("statistics"), torch.no_grad():  # with the prompt that is tested
                p = self.predict(peer, "train")
                kept = peer.kept
                chosen, classes = prototype_samples(
                    p, kept["selected"], kept["labels"], source=self.settings.prototypes
                )
                seen = self.features(peer, "train", chosen)
                kept["prototypes"], kept["mask"] = prototypes(seen, classes, peer.classes)
        return super().evaluate(peer, globally=globally)

    def answer(self, peer: Peer, part: Literal["own", "test"]) -> Tensor:
        if self.settings.alpha == 1:
            return self.predict(peer, part)
        return ensemble(
            self.features(peer, part),
            self.texts(peer),
            peer.kept["prototypes"],
            peer.kept["mask"],
            scale=prompted(peer).backbone.scale,
            alpha=self.settings.alpha,
            vis_scale=self.settings.vis_scale,
        )


class FedCoPlSettings(FedBstSettings):
    """FedBST's keys without its additions."""

    uacp_weight: Literal[0] = 0
    alpha: Literal[1] = 1


class FedCoPl(FedBst):
    """FedBST with lambda 0 and alpha 1."""

    summary = "unlabelled clients learn prompts of a frozen CLIP from labels whose numbers they agree on (FedCoPL)"
    settings_type = FedCoPlSettings
