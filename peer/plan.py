"""Everything about a swarm that can be known before a process is started, or the reason why it cannot run.

The plan is made once and inherited by every peer's process through the fork, data included.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from peer import models
from peer.byzantine import check_lies
from peer.data import sets
from peer.data.partition import Indices, deal_alike, partition, public_split
from peer.data.shard import Shard, split_shard
from peer.devices import assign_devices
from peer.methods.base import Method
from peer.methods.registry import make
from peer.snapshot import weights
from topology import Topology, TopologyError
from topology.file import ModelSpec
from topology.neighbors import Neighbors, neighbors_in
from topology.seeds import stream
from transport.layout import Layout

PROCESS_MB = 60.0
"""Own memory of a peer that has learnt a little, without models and batches: measured, rounded up."""


@dataclass(frozen=True)
class ModelFacts:
    """What is known of one architecture on this data set."""

    spec: ModelSpec
    parameters: int
    snapshot_bytes: int
    message: Layout
    activation_bytes: int
    """Of one sample in training."""

    @property
    def label(self) -> str:
        """The architecture as a person reads it; equal for equal architectures only."""
        return label(self.spec)


@dataclass(frozen=True)
class Plan:
    """A swarm that can run. Peers are numbered from 0, rounds from 1."""

    topology: Topology
    neighbors: Neighbors
    data: sets.DataSet
    public: Indices
    """Training samples that everybody has, in this order, without labels."""
    shards: tuple[Shard, ...]
    facts: tuple[ModelFacts, ...]
    method: Method
    devices: tuple[str, ...]
    threads: tuple[int, ...]

    @property
    def peers(self) -> range:
        return range(self.topology.swarm.peers)

    @property
    def rounds(self) -> range:
        return range(1, self.topology.swarm.rounds + 1)

    @property
    def coordinator(self) -> int | None:
        return self.topology.coordinator

    @property
    def clients(self) -> tuple[int, ...]:
        return self.topology.clients

    @cached_property
    def public_positions(self) -> NDArray[np.int64]:
        """Of each training sample its place among the public ones; -1 for the private."""
        positions = np.full(len(self.data.y_train), -1)
        positions[self.public] = np.arange(len(self.public))
        return positions

    @property
    def outputs(self) -> int:
        """How many outputs a model has: the classes, and one more where the method may answer "unknown"."""
        return self.data.classes + self.method.unknown_class

    def message(self, sender: int, receiver: int, round: int, exchange: int = 1) -> Layout:
        """What travels along an edge in an exchange of a round, both counted from 1."""
        return self.method.message(self, sender, receiver, round, exchange)

    def participants(self, round: int) -> tuple[int, ...]:
        """The peers that send or get anything in a round."""
        return tuple(self.peers) if self.method.everybody_listens else self.topology.participants(round)

    def receivers(self, peer: int, round: int, exchange: int = 1) -> tuple[int, ...]:
        """The neighbors that get a message of this peer in an exchange."""
        near = self._partners(peer, round, self.neighbors.receivers[peer])
        return tuple(j for j in near if self.message(peer, j, round, exchange).bytes > 0)

    def senders(self, peer: int, round: int, exchange: int = 1) -> tuple[int, ...]:
        """The neighbors of which this peer gets a message in an exchange."""
        near = self._partners(peer, round, self.neighbors.senders[peer])
        return tuple(j for j in near if self.message(j, peer, round, exchange).bytes > 0)

    def _partners(self, peer: int, round: int, neighbors: Iterable[int]) -> list[int]:
        chosen = set(self.participants(round))
        return sorted(chosen.intersection(neighbors)) if peer in chosen else []

    def payload(self, round: int) -> int:
        """Exact payload bytes of a round, over all edges and exchanges."""
        return sum(
            self.message(peer, receiver, round, exchange).bytes
            for exchange in range(1, self.method.exchanges + 1)
            for peer in self.participants(round)
            for receiver in self.receivers(peer, round, exchange)
        )

    def number(self, round: int, exchange: int) -> int:
        """An exchange as the transport counts it, all exchanges of a run in one row."""
        return (round - 1) * self.method.exchanges + exchange

    def place(self, number: int) -> tuple[int, int]:
        """The inverse of `number`: round and exchange."""
        rounds, exchange = divmod(number - 1, self.method.exchanges)
        return rounds + 1, exchange + 1

    def deadline_s(self, peer: int) -> float:
        """How long a peer waits for a neighbor that is in its round.

        Twice as long for a coordinator, which itself waits that long for the slowest client.
        """
        waits_for_coordinator = self.coordinator is not None and peer != self.coordinator
        return self.topology.swarm.round_deadline_s * (2 if waits_for_coordinator else 1)

    def predicted_memory_mb(self, peer: int) -> float:
        """An estimate of a peer's own memory: process, training state, messages in flight, teachers."""
        own = self.facts[peer]
        states = 4 if self.topology.training.optimizer == "adam" else 3
        last = self.method.exchanges
        ends = [(1, 1), (1, last), (self.topology.swarm.rounds, 1), (self.topology.swarm.rounds, last)]
        senders = sorted({j for end in ends for j in self.senders(peer, *end)})
        teachers = {self.facts[j].label: self.facts[j] for j in senders}
        sizes = [self.message(j, peer, *end).bytes for j in senders for end in ends]
        in_flight = self.topology.transport.concurrent * max(sizes, default=0)
        batch = self.topology.training.batch_size * own.activation_bytes
        bytes_ = (
            states * 4 * own.parameters
            + 2 * own.message.bytes
            + in_flight
            + sum(fact.snapshot_bytes for fact in teachers.values())
            + 2 * batch
        )
        return PROCESS_MB + float(bytes_) / 1e6


def label(spec: ModelSpec) -> str:
    """`resnet8(width=16)`"""
    options = ", ".join(f"{key}={value}" for key, value in sorted(spec.options.items()))
    return f"{spec.name}({options})" if options else spec.name


def make_plan(topology: Topology, neighbors: Neighbors | None = None) -> Plan:
    """Check everything that can be checked and lay everything out. Raises `TopologyError`.

    The graph is built here unless it was before.
    """
    neighbors = neighbors or neighbors_in(topology)
    method = make(topology.method.name, topology.method.options)
    data = sets.load(topology.data.name, topology.data.root)
    seed, peers = topology.swarm.seed, range(topology.swarm.peers)
    public, private = _public(topology, data)
    parts = partition(
        data.y_train[private],
        len(topology.clients),
        data.classes,
        topology.data.partition,
        stream(seed, "partition"),
        alpha=topology.data.alpha,
        classes_per_peer=topology.data.classes_per_peer,
        min_samples=topology.data.min_samples,
    )
    held_out, nothing = topology.data.held_out, np.empty(0, np.int64)
    shards = [Shard(nothing, nothing, nothing) for _ in peers]
    for peer, part in zip(topology.clients, parts, strict=True):
        shards[peer] = split_shard(data.y_train, private[part], stream(seed, "split", peer), held_out)
    if topology.data.test == "dealt":
        held = np.stack([np.bincount(data.y_train[private[part]], minlength=data.classes) for part in parts], axis=1)
        dealt = deal_alike(data.y_test, held, stream(seed, "test partition"))
        for peer, part in zip(topology.clients, dealt, strict=True):
            shards[peer] = replace(shards[peer], own_of_common_test=part)
    specs = [topology.model_of(i) for i in peers]
    known = {label(spec): spec for spec in specs}
    facts = {key: _facts(spec, data, method, topology.transport.dtype) for key, spec in known.items()}
    if topology.coordinator is not None and not method.coordinated and any(f.message.bytes for f in facts.values()):
        raise TopologyError(
            f"[[peer]] {topology.coordinator}: role = 'coordinator': the method {topology.method.name!r} goes from "
            "peer to peer and has no coordinator. Take the role away, or choose another method"
        )
    devices = assign_devices(topology)
    fair = max(1, len(os.sched_getaffinity(0)) // len(peers))
    shared = fair if topology.devices.threads == "auto" else topology.devices.threads
    overrides = [topology.override(i) for i in peers]
    threads = tuple((override.threads if override else None) or shared for override in overrides)
    resolved = topology.model_copy(
        update={
            "data": topology.data.model_copy(update=_absolute(topology.data.name, topology.data.root)),
            "method": topology.method.model_copy(update={"options": method.settings.model_dump()}),
            "devices": topology.devices.model_copy(
                update={"assign": list(dict.fromkeys(devices)), "threads": shared},
            ),
        }
    )
    of_peers = tuple(facts[label(spec)] for spec in specs)
    plan = Plan(resolved, neighbors, data, public, tuple(shards), of_peers, method, devices, threads)
    method.check(plan)
    check_lies(plan)
    return plan


def _public(topology: Topology, data: sets.DataSet) -> tuple[Indices, Indices]:
    samples = len(data.y_train)
    if topology.data.public == 0:
        return np.empty(0, np.int64), np.arange(samples)
    return public_split(samples, topology.data.public, stream(topology.swarm.seed, "public"))


def _absolute(name: str, root: str) -> dict[str, str]:
    """Where the data lies, from wherever the resolved file is run again."""
    kind, _, path = name.partition(":")
    return {
        "name": f"{kind}:{Path(path).expanduser().absolute()}" if kind in ("npz", "folder") else name,
        "root": str(Path(root).expanduser().absolute()) if root else "",
    }


def _facts(spec: ModelSpec, data: sets.DataSet, method: Method, dtype: str) -> ModelFacts:
    outputs = data.classes + method.unknown_class
    model = models.describe(spec, data.shape, outputs, data.class_names)
    kept = weights(model)
    return ModelFacts(
        spec,
        sum(parameter.numel() for parameter in model.parameters()),
        sum(4 * tensor.numel() for tensor in kept.values()),
        Layout(method.fields(model, data.classes, dtype)),
        _activation_bytes(models.build(spec, data.shape, outputs, 0, 0, data.class_names), data.shape),
    )


def _activation_bytes(model: nn.Module, shape: tuple[int, int, int]) -> int:
    """Bytes that the outputs of a model's layers take for one sample."""
    sizes: list[int] = []

    def note(_: nn.Module, __: object, output: object) -> None:
        if isinstance(output, torch.Tensor):
            sizes.append(output.numel() * output.element_size())

    leaves = [module for module in model.modules() if not list(module.children())]
    handles = [leaf.register_forward_hook(note) for leaf in leaves]
    with torch.no_grad():
        model.eval()(torch.zeros(1, *shape))
    for handle in handles:
        handle.remove()
    return sum(sizes)
