"""Everything about a swarm that can be known before a process is started, or the reason why it cannot run.

The plan is made once and inherited by every peer's process through the fork, data included.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from peer import models
from peer.data import sets
from peer.data.partition import partition
from peer.data.shard import Shard, split_shard
from peer.devices import assign_devices
from peer.methods.base import Method
from peer.methods.registry import make
from peer.snapshot import weights
from topology import Topology
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
    def exchanges(self) -> bool:
        """Whether the method sends anything at all."""
        return self.facts[0].message.bytes > 0

    def receivers(self, peer: int, round: int) -> tuple[int, ...]:
        """The neighbors that get this peer's snapshot in a round."""
        return self._partners(peer, round, self.neighbors.receivers[peer])

    def senders(self, peer: int, round: int) -> tuple[int, ...]:
        """The neighbors whose snapshots this peer gets in a round."""
        return self._partners(peer, round, self.neighbors.senders[peer])

    def _partners(self, peer: int, round: int, neighbors: Iterable[int]) -> tuple[int, ...]:
        chosen = self.topology.participants(round)
        if not self.exchanges or peer not in chosen:
            return ()
        return tuple(sorted(set(neighbors) & set(chosen)))

    def payload(self, round: int) -> int:
        """Exact payload bytes of a round, over all edges."""
        return sum(
            self.facts[peer].message.bytes * len(self.receivers(peer, round))
            for peer in self.topology.participants(round)
        )

    def predicted_memory_mb(self, peer: int) -> float:
        """An estimate of a peer's own memory: process, training state, messages in flight, teachers."""
        own = self.facts[peer]
        states = 4 if self.topology.training.optimizer == "adam" else 3
        teachers = {self.facts[j].label: self.facts[j] for j in self.neighbors.senders[peer]} if self.exchanges else {}
        in_flight = self.topology.transport.concurrent * max((f.message.bytes for f in teachers.values()), default=0)
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
    parts = partition(
        data.y_train,
        len(peers),
        data.classes,
        topology.data.partition,
        stream(seed, "partition"),
        alpha=topology.data.alpha,
        classes_per_peer=topology.data.classes_per_peer,
        min_samples=topology.data.min_samples,
    )
    shards = tuple(split_shard(data.y_train, parts[i], stream(seed, "split", i), topology.data.held_out) for i in peers)
    specs = [topology.model_of(i) for i in peers]
    known = {label(spec): spec for spec in specs}
    facts = {key: _facts(spec, data, method, topology.transport.dtype) for key, spec in known.items()}
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
    plan = Plan(
        resolved, neighbors, data, shards, tuple(facts[label(spec)] for spec in specs), method, devices, threads
    )
    method.check(plan)
    return plan


def _absolute(name: str, root: str) -> dict[str, str]:
    """Where the data lies, from wherever the resolved file is run again."""
    kind, colon, path = name.partition(":")
    return {
        "name": f"{kind}:{Path(path).expanduser().absolute()}" if colon else name,
        "root": str(Path(root).expanduser().absolute()) if root else "",
    }


def _facts(spec: ModelSpec, data: sets.DataSet, method: Method, dtype: str) -> ModelFacts:
    model = models.describe(spec, data.shape, data.classes)
    kept = weights(model)
    return ModelFacts(
        spec,
        sum(parameter.numel() for parameter in model.parameters()),
        sum(4 * tensor.numel() for tensor in kept.values()),
        Layout(method.fields(model, data.classes, dtype)),
        _activation_bytes(models.build(spec, data.shape, data.classes, 0, 0), data.shape),
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
