"""What a method is: what it shares along an edge, and what a peer does in a round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, ConfigDict
from torch import nn

from peer import snapshot
from transport.layout import Field

if TYPE_CHECKING:
    from peer.peer import Peer
    from peer.plan import Plan


class Settings(BaseModel):
    """The keys of a method in `[method]`, beside its name."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Method(ABC):
    """One learning method. It is made once, before the processes are, and holds nothing but its settings."""

    summary: ClassVar[str]
    settings_type: ClassVar[type[Settings]] = Settings

    common_start: ClassVar[bool] = False
    """Whether all peers begin from the same weights, as methods that average weights do."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def check(self, plan: Plan) -> None:
        """Raises `TopologyError` when the method cannot run on this swarm."""
        return

    def fields(self, model: nn.Module, classes: int, dtype: str) -> tuple[Field, ...]:
        """What one message to a neighbor carries; nothing when the method exchanges nothing."""
        return snapshot.fields(model, dtype)

    @abstractmethod
    def run_round(self, peer: Peer) -> dict[str, float]:
        """One round of one peer. What it returns goes to the journal."""
