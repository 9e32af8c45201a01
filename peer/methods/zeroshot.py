"""Zero-shot CLIP: nothing is learnt and nothing sent; what the frozen model says of "a photo of a {name}"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn

from peer.methods.base import Accuracies, Method, Notes
from peer.methods.prompts import PromptLearning, needs_clip
from transport.layout import Field

if TYPE_CHECKING:
    from peer.peer import Peer
    from peer.plan import Plan


class ZeroShot(Method):
    learns_from_labels = False
    summary = "nothing is learnt: what the frozen CLIP says of a photo of a class"

    def check(self, plan: Plan) -> None:
        needs_clip(plan)

    def fields(self, model: nn.Module, classes: int, dtype: str) -> tuple[Field, ...]:
        return ()

    def run_round(self, peer: Peer) -> Notes:
        return {}

    def evaluate(self, peer: Peer, *, globally: bool) -> Accuracies:
        return PromptLearning.evaluate(self, peer, globally=globally)  # type: ignore[arg-type]

    def answer(self, peer: Peer, part: Literal["own", "test"]) -> Tensor:
        return PromptLearning.predict(self, peer, part, plain=True)  # type: ignore[arg-type]
