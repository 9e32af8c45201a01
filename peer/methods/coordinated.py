"""What a method with a coordinator is: a client's half of a round and the coordinator's, in the loop of all peers."""

from __future__ import annotations

from abc import abstractmethod
from math import isfinite
from typing import TYPE_CHECKING

from peer.methods.base import Method, Notes
from topology.errors import TopologyError

if TYPE_CHECKING:
    from peer.peer import Peer
    from peer.plan import Plan


class Coordinated(Method):
    """Clients talk to the coordinator alone: up once they have learnt, down once it has combined."""

    coordinated = True
    coordinator_evaluates = True

    def check(self, plan: Plan) -> None:
        name, coordinator = plan.topology.method.name, plan.coordinator
        if coordinator is None:
            raise TopologyError(
                f"method.name = {name!r}: it needs a coordinator, and no peer has that role. Add one, and a graph in "
                "which all others are its neighbors:\n"
                "    [graph]\n    kind = 'star'\n    [[peer]]\n    id = 0\n    role = 'coordinator'"
            )
        star = {edge for client in plan.clients for edge in ((client, coordinator), (coordinator, client))}
        if {(sender, receiver) for sender, receiver, _ in plan.neighbors.edges} != star:
            raise TopologyError(
                f"graph.kind = {plan.topology.graph.kind!r}: with the method {name!r} clients talk to the coordinator, "
                f"peer {coordinator}, and to nobody else. Set graph.kind = 'star'"
            )

    def run_round(self, peer: Peer) -> Notes:
        return self.coordinate(peer) if peer.is_coordinator else self.learn(peer)

    @abstractmethod
    def learn(self, peer: Peer) -> Notes:
        """The client's half. What it returns goes to the journal."""

    @abstractmethod
    def coordinate(self, peer: Peer) -> Notes:
        """The coordinator's half: gather, combine, send back."""


def needs_public_samples(plan: Plan) -> None:
    """Raise `TopologyError` unless there are public samples to teach through."""
    if len(plan.public) == 0:
        raise TopologyError(
            f"data.public = {plan.topology.data.public:g}: the method {plan.topology.method.name!r} learns from public "
            "samples without labels. Set it to the share of the training set that everybody is to have, e.g. 0.1"
        )


def check_losses(notes: Notes) -> None:
    """Raise ArithmeticError when a loss of the round is not finite: what such a model says is of no use to anybody."""
    losses = [value for name, value in notes.items() if name.endswith("loss") and isinstance(value, float)]
    if not all(map(isfinite, losses)):
        raise ArithmeticError("the loss is not finite: the model has diverged; lower training.learning_rate")
