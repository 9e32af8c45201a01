"""The round of methods whose peers share what their models say of public samples, whatever their architectures.

The frame of FedCC's Algorithm 1. What differs between the methods is how a client learns, what it says of the public
samples, how the coordinator combines that, and how the models answer together in the end.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from peer import snapshot
from peer.learner import fraction_true
from peer.methods.base import Accuracies, Notes
from peer.methods.coordinated import Coordinated, check_losses, needs_public_samples
from peer.methods.local import descend
from topology.errors import TopologyError
from transport.layout import Field, Layout

if TYPE_CHECKING:
    from peer.peer import Peer
    from peer.plan import Plan


class PublicTeaching(Coordinated):
    """Predictions up, a teacher down; the models themselves travel once, in the last round, to answer together."""

    def check(self, plan: Plan) -> None:
        super().check(plan)
        needs_public_samples(plan)
        if plan.topology.transport.dtype == "bfloat16":
            raise TopologyError(
                "transport.dtype = 'bfloat16': predictions that do not add up to 1 within a thousandth are refused, "
                "and bfloat16 is coarser than that. Choose 'float32' or 'float16'"
            )

    def message(self, plan: Plan, sender: int, receiver: int, round: int, exchange: int) -> Layout:
        last = round == plan.topology.swarm.rounds
        samples, dtype = len(plan.public), plan.topology.transport.dtype
        if sender == plan.coordinator:  # nobody would learn from the last round's teacher
            return _layout(() if last else (self.lesson(samples, plan.data.classes, dtype),))
        model = plan.facts[sender].message.fields if last else ()
        return _layout((self.answer(samples, plan.data.classes, dtype), *model))

    def answer(self, samples: int, classes: int, dtype: str) -> Field:
        """What a client says of the public samples."""
        return Field("predictions", dtype, (samples, classes))

    def lesson(self, samples: int, classes: int, dtype: str) -> Field:
        """What comes back of it."""
        return Field("teacher", dtype, (samples, classes))

    nothing: ClassVar[float] = 0
    """Fills a row of the teacher that teaches nothing."""

    @abstractmethod
    def improve(self, peer: Peer, teacher: Tensor | None) -> Notes:
        """Learn from the newest teacher, where there is one, and from the own shard; returns the losses."""

    @abstractmethod
    def combine(self, predictions: Tensor, classes: int) -> Lesson:
        """The coordinator's teacher, from the clients' predictions (K, U, ...)."""

    def usable(self, predictions: Tensor) -> bool:
        """Whether one client's predictions can be combined with others'."""
        return bool(predictions.isfinite().all())

    def predict(self, peer: Peer) -> Tensor:
        """What this client says of the public samples: its logits (U, C)."""
        return peer.predict_public(peer.model)

    def answer_together(self, logits: Tensor, classes: int) -> Tensor:
        """Scores (B, C) that models with logits (K, B, outputs) give together: the log of their mean probability."""
        return mean_probability(logits, classes).log()

    def learn(self, peer: Peer) -> Notes:
        notes = self.improve(peer, peer.kept.get("teacher"))
        check_losses(notes)
        with peer.timing("teachers"):
            predictions = self.predict(peer)
        model = snapshot.named(peer.model) if peer.is_last_round else {}
        peer.send(dict.fromkeys(peer.receivers, model | {"predictions": predictions}))
        for arrival in peer.gather():
            if not arrival.extras["teacher"].isfinite().all():
                peer.refuse(arrival.sender, "its teacher is not finite")
            peer.kept["teacher"] = arrival.extras["teacher"].to(peer.device, copy=True)
        return notes

    def coordinate(self, peer: Peer) -> Notes:
        predictions: dict[int, Tensor] = {}
        answers: dict[int, Tensor] = {}
        for arrival in peer.gather():
            said = arrival.extras["predictions"].to(peer.device, copy=True)
            if not self.usable(said):
                peer.refuse(arrival.sender, "its predictions are not finite")
                continue
            predictions[arrival.sender] = said
            if peer.is_last_round:
                with peer.timing("evaluate"):
                    shown = "client" if arrival.sender == min(peer.senders) else ""
                    logits = peer.predict_test(peer.teacher(arrival), features_as=shown)
                if logits.isfinite().all():
                    answers[arrival.sender] = logits
                else:
                    peer.refuse(arrival.sender, "its model gives logits that are not finite")
        clients = sorted(predictions)  # peer order: sums do not depend on who was first
        if clients:
            with peer.timing("train"):
                lesson = self.combine(torch.stack([predictions[k] for k in clients]), peer.classes)
        else:  # all were too late: a round without a teacher
            field = self.lesson(len(peer.plan.public), peer.classes, peer.topology.transport.dtype)
            lesson = Lesson(torch.full(field.shape, self.nothing), None, {})
        message = {"teacher": lesson.teacher}
        peer.send(dict.fromkeys(peer.receivers, message))
        notes = dict(lesson.notes)
        if lesson.named is not None:  # the public samples' labels are kept for this diagnosis alone
            notes["teacher_accuracy"] = fraction_true(lesson.named == peer.public_labels)
        if answers:
            logits, labels = torch.stack([answers[k] for k in sorted(answers)]), peer.test_labels
            scores = self.answer_together(logits, peer.classes)
            notes["global_accuracy"] = fraction_true(scores.argmax(1) == labels)
            peer.keep_features("together", scores.log_softmax(1))
            notes["plain_ensemble_accuracy"] = fraction_true(mean_probability(logits, peer.classes).argmax(1) == labels)
        return notes

    def evaluate(self, peer: Peer, *, globally: bool) -> Accuracies:
        # The coordinator has no model of its own that learns; how the models answer together is in its notes.
        return Accuracies() if peer.is_coordinator else super().evaluate(peer, globally=globally)


def follow(peer: Peer, teacher: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> dict[str, float]:
    """Learn from a teacher (U, ...) of the public samples by loss(its rows, logits); rows of zeros teach nothing."""
    teaches = (teacher != 0).any(1)
    if not teaches.any():
        return {}

    def losses() -> Iterator[Tensor]:
        for x, positions in peer.public_batches("sync"):
            rows = teaches[positions]
            if rows.any():
                yield loss(teacher[positions[rows]].float(), peer.model(x)[rows])

    return {"sync_loss": descend(peer, peer.model, losses())}


class Lesson(NamedTuple):
    """What the coordinator made of the predictions of a round."""

    teacher: Tensor  # (U, ...) as it is sent
    named: Tensor | None  # (U,) the class it names for each sample
    notes: Mapping[str, float]


def mean_probability(logits: Tensor, classes: int) -> Tensor:
    """Mean over the models of their probabilities of the known classes (B, C), from logits (K, B, outputs)."""
    return logits[:, :, :classes].double().softmax(2).mean(0)


@cache
def _layout(fields: tuple[Field, ...]) -> Layout:
    return Layout(fields)
