"""What a method is: what it shares along an edge, and what a peer does in a round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, ConfigDict
from torch import nn

from peer import snapshot
from transport.layout import Field, Layout

if TYPE_CHECKING:
    from peer.peer import Peer
    from peer.plan import Plan


class Settings(BaseModel):
    """The keys of a method in `[method]`, beside its name."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Notes = Mapping[str, float | Sequence[float]]
"""What a method has to say of a round. `loss` and `global_accuracy` are the round's, the rest is the method's own."""


@dataclass(frozen=True)
class Accuracies:
    """Fractions that are correct; None where nothing was measured."""

    validation: float | None = None
    local: float | None = None
    world: float | None = None


class Method(ABC):
    """One learning method. It is made once, before the processes are, and holds nothing but its settings."""

    summary: ClassVar[str]
    settings_type: ClassVar[type[Settings]] = Settings

    common_start: ClassVar[bool] = False
    """Whether all peers begin from the same weights, as methods that average weights do."""

    coordinated: ClassVar[bool] = False
    """Whether it needs a coordinator; peers of a coordinated method talk to nobody else."""

    coordinator_evaluates: ClassVar[bool] = False
    """Whether what the method is judged by is measured at the coordinator, and not the mean of its clients."""

    exchanges: ClassVar[int] = 1
    """How many times in a round messages may go up and come back."""

    everybody_listens: ClassVar[bool] = False
    """Whether clients that are not drawn for a round take part in it all the same, to listen and to be measured."""

    learns_from_labels: ClassVar[bool] = True
    """Whether the data set's labels are what its peers learn from, and not labels of their own making."""

    unknown_class: ClassVar[bool] = False
    """Whether models have one output more than there are classes, the last, for samples of none that is known."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def check(self, plan: Plan) -> None:
        """Raises `TopologyError` when the method cannot run on this swarm."""
        return

    def fields(self, model: nn.Module, classes: int, dtype: str) -> tuple[Field, ...]:
        """What one message to a neighbor carries; nothing when the method exchanges nothing."""
        return snapshot.fields(model, dtype)

    def message(self, plan: Plan, sender: int, receiver: int, round: int, exchange: int) -> Layout:
        """What travels along one edge in an exchange, for methods where that is not the same for all of a sender's."""
        return plan.facts[sender].message

    @abstractmethod
    def run_round(self, peer: Peer) -> Notes:
        """One round of one peer. What it returns goes to the journal."""

    def evaluate(self, peer: Peer, *, globally: bool) -> Accuracies:
        """How good the peer's model is after the round; on the common test set only when asked for."""
        return peer.evaluate(globally=globally)
