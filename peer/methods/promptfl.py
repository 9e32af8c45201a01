"""PromptFL and PromptProx: clients learn one text context together, on labels that each gives its own images.

Labels: FPL (the most confident of each class), CPL (candidate sets) or CoPL (agreed quotas).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from peer.methods.prompt_baselines import admitted, candidate_loss, candidate_sets, proximal
from peer.methods.prompts import PromptLearning, PromptSettings, prompted
from peer.models import clip

if TYPE_CHECKING:
    from peer.peer import Peer

MOST = 16  # labelled samples of a class, of FPL and CPL


class PromptFlSettings(PromptSettings):
    """The keys of PromptFL."""

    labels: Literal["fpl", "cpl", "copl"] = "fpl"
    cpl_q: Annotated[float, Field(gt=0, lt=1)] = 0.6
    cpl_beta: Annotated[float, Field(gt=0, lt=1)] = 0.9


class PromptFl(PromptLearning):
    """Image features never change, so they are computed once."""

    summary = "clients of a frozen CLIP learn one text context together, on labels of their own making (PromptFL)"
    settings_type: ClassVar[type[PromptFlSettings]] = PromptFlSettings
    settings: PromptFlSettings
    shared = "context"

    @property
    def cooperates(self) -> bool:  # type: ignore[override]
        return self.settings.labels == "copl"

    def own_quota(self, peer: Peer) -> Tensor:
        return torch.full((peer.classes,), MOST)

    def label(self, peer: Peer, p: Tensor) -> dict[str, float]:
        if self.settings.labels != "cpl":
            return super().label(peer, p)
        candidates = candidate_sets(p, q=self.settings.cpl_q, beta=self.settings.cpl_beta)
        selected = admitted(p, candidates, most=MOST)
        peer.kept |= {"selected": selected, "labels": candidates[selected]}
        return {"selected": float(len(selected))}

    def loss(self, peer: Peer, samples: Tensor, labels: Tensor, step: int) -> Tensor:
        scale = prompted(peer).backbone.scale
        logits = clip.logits(self.features(peer, "train", samples), self.texts(peer), scale)
        return candidate_loss(logits, labels) if labels.dim() == 2 else F.cross_entropy(logits, labels)


class PromptProxSettings(PromptFlSettings):
    """The keys of PromptProx."""

    mu: Annotated[float, Field(ge=0)] = 0.5


class PromptProx(PromptFl):
    """PromptFL that stays near the shared context."""

    summary = "PromptFL with a proximal term that holds each client near the shared context (PromptProx)"
    settings_type = PromptProxSettings
    settings: PromptProxSettings

    def train(self, peer: Peer) -> float:
        peer.kept["anchor"] = prompted(peer).context.detach().clone()
        return super().train(peer)

    def loss(self, peer: Peer, samples: Tensor, labels: Tensor, step: int) -> Tensor:
        own = prompted(peer).context
        return super().loss(peer, samples, labels, step) + proximal(own, peer.kept["anchor"], mu=self.settings.mu)
