"""One peer as its method sees it: its model, its shard, its neighbors, and the verbs of an algorithm box.

`share` what I have, `gather` what my neighbors have, run a `teacher`, learn from `batches` with an `optimizer`. All
randomness is a function of (seed, peer, round), all time is booked under a name.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from peer import models, snapshot
from peer.data.shard import Batches, evaluation_batches
from peer.journal import Journal
from peer.learner import Batch, Optimizer, accuracy, class_statistics, count_by_class, learning_rate
from peer.plan import Plan
from transport.layout import seal
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


class Peer:
    """The peer of one process. Rounds count from 1."""

    def __init__(self, id: int, plan: Plan, node: Node, journal: Journal) -> None:
        self.id, self.round = id, 0
        self.plan, self.node, self.journal = plan, node, journal
        self.topology, self.data, self.shard = plan.topology, plan.data, plan.shards[id]
        self.classes = plan.data.classes
        self.device = torch.device(plan.devices[id])
        self.model = self._build(id).to(self.device)
        self.seconds: dict[str, float] = {}
        self.present: list[int] = []
        self.missing: list[int] = []
        self.payload_digest = ""
        self._teachers: dict[str, nn.Module] = {}
        self._validation: tuple[Tensor, Tensor] | None = None

    def begin(self, round: int) -> None:
        """Enter a round, with clean books."""
        self.round = round
        self.seconds = dict.fromkeys(("statistics", "send", "teachers", "train", "evaluate", "wait"), 0.0)
        self.present, self.missing = [], []
        self.node.waited_s = 0.0
        self.node.enter(round)

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Book the time of a block under a name, and stop here when the supervisor has ordered so."""
        self.node.check()
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began

    def statistics(self) -> dict[str, Tensor]:
        """n_c and a_c of the current model on the validation half, as they are shared."""
        n, a = class_statistics(*self.validation())
        return {"n": n, "a": a}

    def share(self, **extras: Tensor) -> None:
        """Offer this model's snapshot, and what belongs to it, to the neighbors of this round."""
        receivers = self.plan.receivers(self.id, self.round)
        if not receivers:
            return
        with self.timing("send"):
            transport = self.topology.transport
            layout = self.plan.facts[self.id].message
            buffers = {name: value.cpu().numpy() for name, value in extras.items()}
            block = layout.pack(buffers | snapshot.to_wire(self.model, transport.dtype))
            self.node.share(seal(layout, block, transport.piece_bytes), receivers)

    def gather(self) -> Iterator[Arrival]:
        """The neighbors' messages of this round, as they arrive; ends when all are here or given up."""
        for item in self.node.gather(self.plan.senders(self.id, self.round)):
            if isinstance(item, Missing):
                self.missing.append(item.sender)
                continue
            self.present.append(item.sender)
            buffers = item.buffers()
            extras = {
                name: torch.from_numpy(buffer) for name, buffer in buffers.items() if not name.startswith("model.")
            }
            try:
                yield Arrival(item.sender, snapshot.received(buffers, self.topology.transport.dtype), extras)
            finally:
                self.node.release(item.block)

    def refuse(self, sender: int, reason: str) -> None:
        """Work on as if this neighbor's message had not come, and say so."""
        self.present.remove(sender)
        self.missing.append(sender)
        self.journal.write("missing", {"round": self.round, "sender": sender, "reason": reason})

    def teacher(self, arrival: Arrival) -> nn.Module:
        """The neighbor's model, frozen, in evaluation mode, with the weights of its snapshot."""
        key = self.plan.facts[arrival.sender].label
        if key not in self._teachers:
            self._teachers[key] = self._build(arrival.sender).to(self.device).requires_grad_(False).eval()
        snapshot.load(self._teachers[key], arrival.weights)
        return self._teachers[key]

    def batches(self) -> "RoundBatches":
        """This round's augmented mini-batches, over all its epochs. Going through them again gives the same bits."""
        return RoundBatches(self)

    def optimizer(self) -> Optimizer:
        """A fresh optimizer for this round, at the round's learning rate."""
        training = self.topology.training
        rate = learning_rate(training, self.round, self.topology.swarm.rounds)
        return Optimizer(self.model, training, rate)

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
                batches = self._on_device(evaluation_batches(self.data, "train", self.shard.validation))
                self._validation = count_by_class(self.model, batches, self.classes)
        return self._validation

    def evaluate(self, *, globally: bool) -> dict[str, float | None]:
        """Validation, local test and, when asked for, global test accuracy, as fractions."""
        validation = accuracy(*self.validation())
        with self.timing("evaluate"):
            local = self._on_device(evaluation_batches(self.data, "train", self.shard.test))
            world = self._on_device(evaluation_batches(self.data, "test")) if globally else iter(())
            return {
                "validation_accuracy": validation,
                "local_accuracy": accuracy(*count_by_class(self.model, local, self.classes)),
                "global_accuracy": accuracy(*count_by_class(self.model, world, self.classes)) if globally else None,
            }

    def _build(self, peer: int) -> nn.Module:
        spec, seed = self.plan.facts[peer].spec, self.topology.swarm.seed
        return models.build(spec, self.data.shape, self.classes, seed, 0 if self.plan.method.common_start else peer)

    def _on_device(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        return ((x.to(self.device), y.to(self.device)) for x, y in batches)


class RoundBatches:
    """The batches of one peer in one round, on its device; made anew at each pass, so they take no memory."""

    def __init__(self, peer: Peer) -> None:
        training, data = peer.topology.training, peer.topology.data
        self._device = peer.device
        self._epochs = [
            Batches(
                peer.data,
                peer.shard.train,
                batch_size=training.batch_size,
                seed=peer.topology.swarm.seed,
                peer=peer.id,
                round=peer.round,
                epoch=epoch,
                augment=data.augment,
            )
            for epoch in range(training.epochs)
        ]
        self._check = peer.node.check

    def __len__(self) -> int:
        return sum(len(epoch) for epoch in self._epochs)

    def __iter__(self) -> Iterator[Batch]:
        for epoch in self._epochs:
            for x, y in epoch:
                self._check()
                yield x.to(self._device), y.to(self._device)
