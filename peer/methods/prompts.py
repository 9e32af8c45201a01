"""The round of methods that train prompts of a frozen CLIP on images without labels, through a coordinator.

Two exchanges a round. In the first, when it is time to relabel, clients report how many samples of each class they
know reliably and get their quotas. In the second those that were drawn train and send the prompt that is shared; its
mean comes back to everybody. What differs between the methods is which prompts learn, which one travels, where labels
come from, and the loss. Labels of the data set are looked at by nothing but diagnosis and evaluation.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from functools import cache
from math import isfinite
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, cast

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from peer.learner import fraction_true
from peer.methods.averaging import needs_one_architecture, weighted_average
from peer.methods.base import Accuracies, Notes, Settings
from peer.methods.coordinated import Coordinated
from peer.methods.copl import allocate, class_counts, learning_rate, relabels, select
from peer.models import clip
from peer.models.prompted import PromptedClip
from topology.errors import TopologyError
from topology.seeds import stream
from transport import layout as wire

if TYPE_CHECKING:
    from peer.peer import Peer
    from peer.plan import Plan

Prompt = Literal["visual", "context"]


class PromptSettings(Settings):
    """What every method of this kind can be told."""

    relabel_every: Annotated[int, Field(ge=1)] = 5  # Q
    absent_class: Literal["explore", "zero"] = "explore"
    budget_rounding: Literal["code", "paper"] = "code"


class PromptLearning(Coordinated):
    """Clients keep their labels, counts and contexts in `peer.kept` until the next relabelling."""

    coordinator_evaluates = False
    exchanges = 2
    everybody_listens = True
    learns_from_labels = False
    common_start = True
    settings_type: ClassVar[type[PromptSettings]] = PromptSettings
    settings: PromptSettings

    shared: ClassVar[Prompt] = "visual"
    """The prompt that travels."""

    cooperates = True
    """Whether quotas are agreed upon; else the first exchange is empty."""

    def check(self, plan: Plan) -> None:
        super().check(plan)
        needs_clip(plan)
        needs_one_architecture(plan, f"method.name = {plan.topology.method.name!r}: it")

    def message(self, plan: Plan, sender: int, receiver: int, round: int, exchange: int) -> wire.Layout:
        from_client = sender != plan.coordinator
        if exchange == 1:
            asked = self.cooperates and relabels(round, self.settings.relabel_every)
            name = "counts" if from_client else "quota"
            return _layout((wire.Field(name, "int32", (plan.data.classes,)),) if asked else ())
        (prompt,) = (one for one in plan.facts[sender].message.fields if one.name == f"model.{self.shared}")
        if not from_client:
            return _layout((prompt,))
        trains = sender in plan.topology.participants(round)
        return _layout((prompt, wire.Field("selected", "int32", (1,))) if trains else ())

    # The client's half.

    def learn(self, peer: Peer) -> Notes:
        notes: dict[str, float] = {}
        if relabels(peer.round, self.settings.relabel_every):
            with peer.timing("statistics"):
                p = self.predict(peer, "train", plain=peer.round == 1)
            notes |= self.label(peer, p)
        peer.begin_exchange()
        model, chosen = prompted(peer), peer.kept["selected"]
        if peer.receivers:
            if len(chosen):  # UACP alone would drive a client to the uniform distribution
                notes["loss"] = self.train(peer)
            prompt = {f"model.{self.shared}": getattr(model, self.shared)}
            weight = torch.tensor([len(chosen)], dtype=torch.int32)
            peer.send(dict.fromkeys(peer.receivers, prompt | {"selected": weight}))
        for arrival in peer.gather():
            with torch.no_grad():
                getattr(model, self.shared).copy_(arrival.weights[self.shared])
        return notes

    def label(self, peer: Peer, p: Tensor) -> dict[str, float]:
        """Choose the samples that get a label, from all samples' probabilities p (n, C)."""
        quota = self.agree_on_quota(peer, p) if self.cooperates else self.own_quota(peer)
        selected, labels = select(p, quota)
        peer.kept |= {"selected": selected, "labels": labels}
        true = torch.from_numpy(peer.data.y_train[peer.shard.train])
        known = {"label_accuracy": fraction_true(true[selected.cpu()] == labels.cpu())} if len(selected) else {}
        return {"selected": float(len(selected)), **known}

    def agree_on_quota(self, peer: Peer, p: Tensor) -> Tensor:
        peer.send(dict.fromkeys(peer.receivers, counts_message(class_counts(p))))
        quota = torch.zeros(peer.classes, dtype=torch.int64)
        for arrival in peer.gather():
            quota = arrival.extras["quota"].long()
        return quota

    def own_quota(self, peer: Peer) -> Tensor:
        raise NotImplementedError

    @abstractmethod
    def loss(self, peer: Peer, samples: Tensor, labels: Tensor, step: int) -> Tensor:
        """The loss of one labelled batch, from the samples' places in the shard."""

    def train(self, peer: Peer) -> float:
        """Local epochs over the labelled samples with a fresh optimizer, along the cosine since the relabelling."""
        training, model = peer.topology.training, prompted(peer)
        losses = []
        with peer.timing("train"):
            optimizer, step = peer.optimizer(), 0
            for epoch in range(training.epochs):
                optimizer.rate = learning_rate(
                    training.learning_rate,
                    peer.round,
                    epoch,
                    every=self.settings.relabel_every,
                    epochs=training.epochs,
                )
                for batch in self._batches(peer, epoch):
                    loss = self.loss(peer, peer.kept["selected"][batch], peer.kept["labels"][batch], step)
                    optimizer.step(loss)
                    losses.append(loss.detach())
                    step += 1
            mean = float(torch.stack(losses).mean())
        if not isfinite(mean) or not getattr(model, self.shared).isfinite().all():
            raise ArithmeticError("the loss is not finite: the prompts have diverged; lower training.learning_rate")
        return mean

    def _batches(self, peer: Peer, epoch: int) -> Iterator[Tensor]:
        order = stream(peer.topology.swarm.seed, "loader", peer.id, peer.round, epoch)
        shuffled = torch.from_numpy(order.permutation(len(peer.kept["selected"])))
        return iter(torch.split(shuffled, peer.topology.training.batch_size))

    # Seeing and predicting.

    def features(self, peer: Peer, part: Literal["train", "own", "test"], chosen: Tensor | None = None) -> Tensor:
        """Features of a client's samples, under its visual prompt where the method has one."""
        visual = prompted(peer).visual if self.shared == "visual" else None
        return images(peer, part).features(chosen, visual)

    def texts(self, peer: Peer) -> Tensor:
        return prompted(peer).texts()

    @torch.no_grad()
    def predict(self, peer: Peer, part: Literal["train", "own", "test"], *, plain: bool = False) -> Tensor:
        """Probabilities (n, C) of a client's samples; `plain`: without any prompt, which is zero-shot."""
        model = prompted(peer)
        seen = images(peer, part).features() if plain else self.features(peer, part)
        texts = model.plain_texts() if plain else self.texts(peer)
        return clip.logits(seen, texts, model.backbone.scale).softmax(1)

    def answer(self, peer: Peer, part: Literal["own", "test"]) -> Tensor:
        """Probabilities (n, C) that the method is judged by."""
        return self.predict(peer, part)

    def evaluate(self, peer: Peer, *, globally: bool) -> Accuracies:
        # Both tests run all of a client's images through the backbone: as often as `training.test_every` says.
        if peer.is_coordinator or not globally:
            return Accuracies()
        with peer.timing("evaluate"), torch.no_grad():
            labels = peer.test_labels
            own = labels[torch.from_numpy(peer.shard.own_of_common_test)]
            local = fraction_true(self.answer(peer, "own").argmax(1) == own) if len(own) else None
            world = fraction_true(self.answer(peer, "test").argmax(1) == labels)
        return Accuracies(None, local, world)

    # The coordinator's half.

    def coordinate(self, peer: Peer) -> Notes:
        if peer.receivers:
            self._allocate(peer)
        peer.begin_exchange()
        weights: dict[int, float] = {}
        prompts: dict[int, dict[str, Tensor]] = {}
        for arrival in peer.gather():
            weights[arrival.sender] = float(arrival.extras["selected"][0])
            prompts[arrival.sender] = {self.shared: arrival.weights[self.shared].clone()}
        clients = [k for k in sorted(prompts) if weights[k] > 0]
        shared = getattr(prompted(peer), self.shared)
        if clients:  # where nobody labelled anything the prompt stays as it is
            mean = weighted_average([prompts[k] for k in clients], [weights[k] for k in clients])
            with torch.no_grad():
                shared.copy_(mean[self.shared])
        message = {f"model.{self.shared}": shared}
        peer.send(dict.fromkeys(peer.receivers, message))
        return {"labelled": sum(weights.values())}

    def _allocate(self, peer: Peer) -> None:
        clients = peer.plan.clients
        counts = torch.zeros(len(clients), peer.classes, dtype=torch.int64)
        for arrival in peer.gather():
            counts[clients.index(arrival.sender)] = arrival.extras["counts"].long()
        quotas = allocate(
            counts,
            train_size=sum(len(peer.plan.shards[k].train) for k in clients),
            period=(peer.round - 1) // self.settings.relabel_every,
            absent_class=self.settings.absent_class,
            rounding=self.settings.budget_rounding,
        ).to(torch.int32)
        peer.send({k: {"quota": quotas[clients.index(k)]} for k in peer.receivers})


def counts_message(counts: Tensor) -> dict[str, Tensor]:
    return {"counts": counts.to(torch.int32)}


def needs_clip(plan: Plan) -> None:
    """Raise `TopologyError` unless every peer's model is a prompted CLIP."""
    others = sorted({facts.label for facts in plan.facts if facts.spec.name not in ("clip", "tiny-clip")})
    if others:
        raise TopologyError(
            f"models.pool: the method {plan.topology.method.name!r} learns prompts of a frozen CLIP; "
            f"{', '.join(others)} is none. Name 'clip' or 'tiny-clip'"
        )


def prompted(peer: Peer) -> PromptedClip:
    return cast(PromptedClip, peer.model)


def images(peer: Peer, part: Literal["train", "own", "test"]) -> clip.Images:
    """The images of a client's shard, of its own part of the test set, or of the whole of that."""
    if part not in peer.images:
        x = peer.data.x_train if part == "train" else peer.data.x_test
        indices = {
            "train": peer.shard.train,
            "own": peer.shard.own_of_common_test,
            "test": np.arange(len(peer.data.y_test)),
        }[part]

        def load(chosen: Tensor) -> Tensor:
            return prompted(peer).see(x[indices[chosen.cpu().numpy()]], peer.data).to(peer.device)

        peer.images[part] = clip.Images(prompted(peer).backbone, load, len(indices))
    return peer.images[part]


@cache
def _layout(fields: tuple[wire.Field, ...]) -> wire.Layout:
    return wire.Layout(fields)
