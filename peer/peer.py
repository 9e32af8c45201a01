"""One peer as its method sees it: its model, its shard, its neighbors, and the verbs of an algorithm box.

`share` what I have, `gather` what my neighbors have, run a `teacher`, learn from `batches` with an `optimizer`. All
randomness is a function of (seed, peer, round), all time is booked under a name.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import count, islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from peer import models, snapshot
from peer.byzantine import Lies
from peer.data.shard import Batches, Indices, evaluation_batches
from peer.features import balanced, watch
from peer.journal import Journal
from peer.learner import (
    Batch,
    Optimizer,
    accuracy,
    accuracy_by_class,
    class_statistics,
    count_by_class,
    fraction_true,
    learning_rate,
)
from peer.methods.base import Accuracies
from peer.models.clip import Images
from peer.plan import Plan
from peer.unknown import evidence, prior_accuracy
from transport.layout import Snapshot, seal
from transport.node import Node
from transport.transfers import Missing


@dataclass(frozen=True)
class Arrival:
    """A neighbor's message, valid until the next one is asked for: the memory under it is used again."""

    sender: int
    weights: Mapping[str, Tensor]
    extras: Mapping[str, Tensor]

    def statistics(self) -> tuple[Tensor, Tensor]:
        """The n (C,) and a (C,) that came with the snapshot."""
        return self.extras["n"].clone(), self.extras["a"].clone()


class CoordinatorLost(Exception):
    """The coordinator's message will not come, and without it there is nothing to go on with."""


class Peer:
    """The peer of one process. Rounds count from 1."""

    def __init__(self, id: int, plan: Plan, node: Node, journal: Journal) -> None:
        self.id, self.round, self.exchange = id, 0, 1
        self.plan, self.node, self.journal = plan, node, journal
        self.topology, self.data, self.shard = plan.topology, plan.data, plan.shards[id]
        self.classes = plan.data.classes
        self.is_coordinator = id == plan.coordinator
        self.device = torch.device(plan.devices[id])
        self.model = self._build(id).to(self.device)
        self.spans: list[tuple[str, float, float]] = []
        """What the round's time went into: the name, and from when to when on the monotonic clock."""
        self.present: list[int] = []
        self.missing: list[int] = []
        self.evidence: Mapping[str, object] = {}
        self.class_accuracy: list[float | None] | None = None
        self.features: dict[str, Tensor] = {}
        self.images: dict[str, Images] = {}
        self.kept: dict[str, Tensor] = {}
        """What the method keeps from one round to the next, beside the model."""
        self.at_phase: list[Callable[[int, str], None]] = []
        """What is done when a point of a round is reached, with the round and the name of the point."""
        self.at_release: list[Callable[[int], None]] = []
        """What is done when a neighbor's message has been read, before its memory is given back."""
        self.lies: Lies | None = None
        """What a peer that was told to lie says in place of the truth."""
        self._reached: set[str] = set()
        self._teachers: dict[str, nn.Module] = {}
        self._students: dict[str, nn.Module] = {}
        self._validation: tuple[Tensor, Tensor] | None = None

    def begin(self, round: int) -> None:
        """Enter a round, with clean books."""
        self.round = round
        self.spans.clear()
        self.node.waits.clear()
        self.present, self.missing, self.evidence, self.class_accuracy = [], [], {}, None
        self._enter(1)
        self._reached.clear()
        self.reach("begin")

    def reach(self, phase: str) -> None:
        """Come to a point of the round (`topology.faults.Phase`), for the first time in it or again."""
        if phase not in self._reached:
            self._reached.add(phase)
            for act in self.at_phase:
                act(self.round, phase)

    def begin_exchange(self) -> None:
        """Go on to the round's next exchange of messages."""
        self._enter(self.exchange + 1)

    def _enter(self, exchange: int) -> None:
        self.exchange = exchange
        self.node.enter(self.plan.number(self.round, exchange))

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Book the time of a block under a name, and stop here when the supervisor has ordered so."""
        self.node.check()
        self.reach(name)
        began = time.monotonic()
        try:
            yield
        finally:
            self.spans.append((name, began, time.monotonic()))

    def statistics(self) -> dict[str, Tensor]:
        """n_c and a_c of the current model on the validation half, as they are shared."""
        n, a = class_statistics(*self.validation())
        return {"n": n, "a": a}

    @property
    def is_last_round(self) -> bool:
        return self.round == self.topology.swarm.rounds

    @cached_property
    def label_counts(self) -> Tensor:
        """How many training samples of each class (C,) the peer holds."""
        return torch.from_numpy(np.bincount(self.data.y_train[self.shard.train], minlength=self.classes))

    @property
    def public_labels(self) -> Tensor:
        """The true classes (U,) of the public samples, which no learning may look at."""
        return torch.from_numpy(self.data.y_train[self.plan.public]).to(self.device)

    @property
    def test_labels(self) -> Tensor:
        return torch.tensor(self.data.y_test).to(self.device)

    @property
    def receivers(self) -> tuple[int, ...]:
        """The neighbors that get a message of this peer in this exchange."""
        return self.plan.receivers(self.id, self.round, self.exchange)

    @property
    def senders(self) -> tuple[int, ...]:
        """The neighbors of which this peer gets a message in this exchange."""
        return self.plan.senders(self.id, self.round, self.exchange)

    def share(self, **extras: Tensor) -> None:
        """Offer this model's snapshot, and what belongs to it, to the neighbors of this round."""
        self.send(dict.fromkeys(self.receivers, snapshot.named(self.model) | extras))

    def send(self, messages: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Offer each neighbor its tensors, which its message's layout names; once an exchange."""
        if not messages:
            return
        with self.timing("send"):
            sealed: dict[tuple[int, int], Snapshot] = {}
            snapshots = {}
            if self.lies:
                messages = self.lies.messages(self.round, self.exchange, messages)
            for receiver, tensors in messages.items():
                layout = self.plan.message(self.id, receiver, self.round, self.exchange)
                key = (id(tensors), layout.hash)  # what several get is packed and checksummed once
                if key not in sealed:
                    block = layout.pack(snapshot.to_wire(tensors, layout))
                    sealed[key] = seal(layout, block, self.topology.transport.piece_bytes)
                snapshots[receiver] = sealed[key]
            self.node.share(snapshots)

    def gather(self) -> Iterator[Arrival]:
        """The neighbors' messages of this round, as they arrive; ends when all are here or given up."""
        self.reach("gather")
        for item in self.node.gather(self.senders):
            if isinstance(item, Missing):
                self.missing.append(item.sender)
                if item.sender == self.plan.coordinator:
                    raise CoordinatorLost(item.reason)
                continue
            self.present.append(item.sender)
            weights, extras = snapshot.from_wire(item.buffers(), item.layout)
            try:
                if reason := snapshot.nonsense(weights, extras):
                    self.refuse(item.sender, reason)
                else:
                    yield Arrival(item.sender, weights, extras)
                    for act in self.at_release:
                        act(item.sender)
            finally:
                self.node.release(item.block)

    def refuse(self, sender: int, reason: str) -> None:
        """Work on as if this neighbor's message had not come, and say so."""
        self.present.remove(sender)
        self.missing.append(sender)
        self.journal.write("missing", {"round": self.round, "sender": sender, "reason": reason})
        if sender == self.plan.coordinator:
            raise CoordinatorLost(reason)

    def teacher(self, arrival: Arrival) -> nn.Module:
        """The neighbor's model, frozen, in evaluation mode, with the weights of its snapshot."""
        key = self.plan.facts[arrival.sender].label
        if key not in self._teachers:
            self._teachers[key] = self._build(arrival.sender).to(self.device).requires_grad_(False).eval()
        snapshot.load(self._teachers[key], arrival.weights)
        return self._teachers[key]

    def student(self, label: str) -> nn.Module:
        """A coordinator's own model of an architecture that clients have, from the common start on."""
        if label not in self._students:
            client = next(k for k in self.plan.clients if self.plan.facts[k].label == label)
            self._students[label] = self._build(client).to(self.device)
        return self._students[label]

    def batches(self, step: str = "") -> "RoundBatches":
        """This round's augmented mini-batches, over all its epochs. Going through them again gives the same bits.

        Where a round learns in several steps, each names its own.
        """
        labels = self.lies.labels(self.round, self.data.y_train, self.classes) if self.lies else None
        return RoundBatches(self, self.shard.train, step, labels)

    def public_batches(self, step: str) -> "RoundBatches":
        """The same over the public samples, which everybody has and whose labels nobody sees.

        In the labels' place is where each sample stands among the public ones.
        """
        return RoundBatches(self, self.plan.public, f"public {step}", self.plan.public_positions)

    def predict_public(self, model: nn.Module) -> Tensor:
        """A model's logits (U, outputs) on the public samples, in evaluation mode, in their fixed order."""
        return self._predict(model, evaluation_batches(self.data, "train", self.plan.public))

    def predict_test(self, model: nn.Module, features_as: str = "") -> Tensor:
        """A model's logits (N, outputs) on the common test set, in evaluation mode; its features kept on request."""
        with watch(model) as seen:
            logits = self._predict(model, evaluation_batches(self.data, "test"))
        if features_as and seen:
            self.keep_features(features_as, torch.cat(seen))
        return logits

    def keep_features(self, name: str, values: Tensor) -> None:
        """Keep what is known (N, …) of the test images, of which a few of each class go into the run folder."""
        self.features[name] = values[balanced(self.test_labels, self.classes)].float()

    @torch.no_grad()
    def _predict(self, model: nn.Module, batches: Iterator[Batch]) -> Tensor:
        model.eval()
        logits = []
        for x, _ in self._on_device(batches):
            self.node.check()
            logits.append(model(x))
        return torch.cat(logits)

    def optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """A fresh optimizer for this peer's model or another, at the round's learning rate."""
        training = self.topology.training
        rate = learning_rate(training, self.round, self.topology.swarm.rounds)
        return Optimizer(model or self.model, training, rate)

    def mixing_weights(self) -> dict[int, float]:
        """What this peer gives itself and each neighbor when it averages (a row of the mixing matrix)."""
        row = self.plan.neighbors.mixing[self.id]
        return {self.id: float(row[self.id])} | {int(j): float(row[j]) for j in np.flatnonzero(row)}

    def changed(self) -> None:
        """The model is another than before: what was measured on it is void."""
        self._validation = None

    def validation(self) -> tuple[Tensor, Tensor]:
        """Samples and correct ones a class on the validation half; measured once for each state of the model."""
        if self._validation is None:
            with self.timing("statistics"):
                self._validation = count_by_class(self.model, self._of_shard(self.shard.validation), self.classes)
        return self._validation

    def evaluate(self, *, globally: bool) -> Accuracies:
        """Validation, local test and, when asked for, global test accuracy.

        Where a peer holds no test samples of its own, local accuracy is that on the common ones, each class weighing
        what it weighs in the peer's shard.
        """
        validation = accuracy(*self.validation())
        with self.timing("evaluate"):
            local = accuracy(*count_by_class(self.model, self._own_test(), self.classes))
            if not globally:
                return Accuracies(validation, local)
            logits, labels = self.predict_test(self.model), self.test_labels
            if local is None and len(self.shard.train):
                local = prior_accuracy(logits, labels, self.label_counts)
            if self.plan.coordinator is not None and not self.is_coordinator:
                self.evidence = evidence(logits, labels, self.label_counts)
            self.class_accuracy = accuracy_by_class(logits, labels, self.classes)
            return Accuracies(validation, local, fraction_true(logits[:, : self.classes].argmax(1) == labels))

    def _build(self, peer: int) -> nn.Module:
        spec, seed = self.plan.facts[peer].spec, self.topology.swarm.seed
        start = 0 if self.plan.method.common_start else peer
        return models.build(spec, self.data.shape, self.plan.outputs, seed, start, self.data.class_names)

    def _own_test(self) -> Iterator[Batch]:
        if self.topology.data.test == "dealt":
            return self._on_device(evaluation_batches(self.data, "test", self.shard.own_of_common_test))
        return self._of_shard(self.shard.test)

    def _of_shard(self, indices: Indices) -> Iterator[Batch]:
        return self._on_device(evaluation_batches(self.data, "train", indices))

    def _on_device(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        return ((x.to(self.device), y.to(self.device)) for x, y in batches)


class RoundBatches:
    """The batches of one peer in one step of a round, on its device; made anew at each pass, so they take no memory."""

    def __init__(self, peer: Peer, indices: Indices, step: str, targets: NDArray[np.int64] | None = None) -> None:
        self._peer, self._indices, self._step, self._targets = peer, indices, step, targets
        self._epochs = [self._epoch(number) for number in range(peer.topology.training.epochs)]

    def _epoch(self, number: int) -> Batches:
        peer = self._peer
        return Batches(
            peer.data,
            self._indices,
            batch_size=peer.topology.training.batch_size,
            seed=peer.topology.swarm.seed,
            peer=peer.id,
            round=peer.round,
            epoch=number,
            step=self._step,
            augment=peer.topology.data.augment,
            targets=self._targets,
        )

    def __len__(self) -> int:
        return sum(len(epoch) for epoch in self._epochs)

    def __iter__(self) -> Iterator[Batch]:
        for epoch in self._epochs:
            yield from self._on_device(epoch)

    def beside(self, other: "RoundBatches") -> Iterator[tuple[Batch, Batch]]:
        """Batches of both, side by side; an epoch is as long as the longer of the two, the shorter starts over."""
        steps = max(len(self), len(other))
        return islice(zip(self._endlessly(), other._endlessly(), strict=True), steps)

    def _endlessly(self) -> Iterator[Batch]:
        return (batch for number in count() for batch in self._on_device(self._epoch(number)))

    def _on_device(self, epoch: Batches) -> Iterator[Batch]:
        for x, y in epoch:
            self._peer.node.check()
            yield x.to(self._peer.device), y.to(self._peer.device)
