"""Reads a topology file into a `Topology` that is valid as a whole, or says everything that is wrong with it."""

import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import Field, ValidationError, ValidationInfo, field_validator

from topology.edges import Edge, edge_mistakes
from topology.errors import TopologyError, raise_any
from topology.faults import Fault, fault_mistakes, without_tcp
from topology.mistakes import sentences
from topology.sections import (
    CompleteGraph,
    DataSection,
    DevicesSection,
    EdgeEntry,
    Graph,
    Method,
    MethodSection,
    ModelSpec,
    ModelsSection,
    PeerOverride,
    Section,
    SwarmSection,
    TrainingSection,
    TransportSection,
    is_directed,
)
from topology.seeds import stream

__all__ = ["EdgeEntry", "MethodSection", "ModelSpec", "PeerOverride", "Topology", "dump", "load"]


class Topology(Section):
    """What a swarm is. Every key has its default, and what one key says agrees with what another says."""

    swarm: SwarmSection = Field(default_factory=SwarmSection)
    graph: Graph = Field(default_factory=CompleteGraph)
    data: DataSection = Field(default_factory=DataSection)
    models: ModelsSection = Field(default_factory=ModelsSection)
    method: Method = Field(default_factory=MethodSection)
    training: TrainingSection = Field(default_factory=TrainingSection)
    transport: TransportSection = Field(default_factory=TransportSection)
    devices: DevicesSection = Field(default_factory=DevicesSection)
    peer: list[PeerOverride] = Field(default_factory=list)
    edge: list[EdgeEntry] = Field(default_factory=list)
    fault: list[Fault] = Field(default_factory=list)

    def override(self, peer: int) -> PeerOverride | None:
        """The `[[peer]]` entry of a peer, if it has one."""
        return next((entry for entry in self.peer if entry.id == peer), None)

    @property
    def coordinator(self) -> int | None:
        """The peer that combines what the others share, where the file names one."""
        return next((entry.id for entry in self.peer if entry.role == "coordinator"), None)

    @property
    def clients(self) -> tuple[int, ...]:
        """The peers that learn from data of their own: all but the coordinator."""
        return tuple(peer for peer in range(self.swarm.peers) if peer != self.coordinator)

    def model_of(self, peer: int) -> ModelSpec:
        """The model of a peer: its own, else the pool's, dealt round robin."""
        entry = self.override(peer)
        return (entry and entry.model) or self.models.pool[peer % len(self.models.pool)]

    def participants(self, round: int) -> tuple[int, ...]:
        """The peers that take part in a round, in order; drawn from the seed and the round alone.

        A coordinator always does; `swarm.participants` are drawn from the clients.
        """
        size = self.swarm.participants
        if size == "all":
            return tuple(range(self.swarm.peers))
        drawn = stream(self.swarm.seed, "participation", round).choice(self.clients, size=size, replace=False)
        always = [] if self.coordinator is None else [self.coordinator]
        return tuple(sorted([*drawn.tolist(), *always]))

    @property
    def directed(self) -> bool:
        """Whether an edge from i to j says nothing of one from j to i."""
        return is_directed(self.graph)

    @property
    def listed_edges(self) -> list[Edge]:
        """The `[[edge]]` entries, each with its place."""
        return _listed(self.edge)

    @field_validator("peer")
    @classmethod
    def _peers_are_distinct(cls, entries: list[PeerOverride], info: ValidationInfo) -> list[PeerOverride]:
        raise_any(_peer_mistakes(entries, info.data.get("swarm")))
        transport = info.data.get("transport")
        if transport is not None and transport.security == "none":
            raise_any(_bare(entries))
        return entries

    @field_validator("edge")
    @classmethod
    def _edges_are_distinct(cls, entries: list[EdgeEntry], info: ValidationInfo) -> list[EdgeEntry]:
        if "swarm" in info.data and "graph" in info.data:
            directed = is_directed(info.data["graph"])
            raise_any(edge_mistakes(_listed(entries), info.data["swarm"].peers, directed))
        return entries

    @field_validator("fault")
    @classmethod
    def _faults_befall_what_is_there(cls, faults: list[Fault], info: ValidationInfo) -> list[Fault]:
        swarm = info.data.get("swarm")
        if swarm is not None:
            coordinators = [entry.id for entry in info.data.get("peer", []) if entry.role == "coordinator"]
            raise_any(fault_mistakes(faults, swarm.peers, swarm.rounds, next(iter(coordinators), None)))
        transport = info.data.get("transport")
        if transport and transport.kind == "ipc":
            raise_any(without_tcp(faults))
        return faults


def load(path: str | Path, overrides: Sequence[str] = ()) -> Topology:
    """Read a topology file, with overrides such as "swarm.rounds=5" on top. Raises `TopologyError`."""
    path = Path(path)
    data = _read(path)
    for override in overrides:
        _apply(override, data)
    graph = data.get("graph")
    if isinstance(graph, dict) and graph.get("kind") == "file" and isinstance(graph.get("path"), str):
        # Absolute from here on, so that the copy in the run folder means the same file.
        graph["path"] = str((path.parent / Path(graph["path"]).expanduser()).absolute())
    try:
        return Topology.model_validate(data)
    except ValidationError as error:
        raise TopologyError("\n".join(sentences(error, Topology, data))) from error


def dump(topology: Topology) -> str:
    """Write a topology as TOML with every default spelled out; loading it gives an equal topology."""
    return tomli_w.dumps(topology.model_dump(by_alias=True, exclude_none=True))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8-sig"))
    except FileNotFoundError:
        raise TopologyError(f"{path}: there is no such file (looked in {Path.cwd()})") from None
    except IsADirectoryError:
        raise TopologyError(f"{path}: is a folder; name the topology file in it") from None
    except OSError as error:
        raise TopologyError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TopologyError(f"{path}: is not text in UTF-8, which TOML must be") from error
    except tomllib.TOMLDecodeError as error:
        raise TopologyError(f"{path}: is not valid TOML: {error}") from error


def _apply(override: str, data: dict[str, Any]) -> None:
    key, equals, text = override.partition("=")
    section, dot, name = (part.strip() for part in key.partition("."))
    if not (equals and dot and section and name):
        raise TopologyError(f"{override!r}: an override is section.key=value, such as swarm.rounds=5")
    if section == "fault":
        _apply_to_fault(override, name, _value(override, text.strip()), data)
        return
    if section in ("peer", "edge"):
        raise TopologyError(f"{override!r}: [[{section}]] entries cannot be overridden; change them in the file")
    table = data.setdefault(section, {})
    if isinstance(table, dict):
        table[name] = _value(override, text.strip())


def _apply_to_fault(override: str, name: str, value: object, data: dict[str, Any]) -> None:
    id, dot, key = name.rpartition(".")
    entries = data.get("fault", [])
    rules = {entry["id"]: entry for entry in entries if isinstance(entry, dict) and "id" in entry}
    if not dot or id not in rules:
        known = ", ".join(sorted(map(str, rules))) or "none"
        raise TopologyError(f"{override!r}: must be fault.ID.key=value with the id of a fault of the file: {known}")
    rules[id][key] = value


def _value(override: str, text: str) -> object:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if text[:1] in tuple("[{\"'"):
            raise TopologyError(
                f"{override!r}: {text} is not a TOML value: {error}. If the shell took quotes away, put the whole "
                "override in quotes: 'models.pool=[\"cnn6\"]'"
            ) from error
        return text  # a bare word
    return parsed["value"] if len(parsed) == 1 else text


def _listed(entries: list[EdgeEntry]) -> list[Edge]:
    return [
        Edge(entry.sender, entry.receiver, entry.weight, f"[[edge]] {entry.sender} -> {entry.receiver}")
        for entry in entries
    ]


def _bare(entries: list[PeerOverride]) -> Iterable[str]:
    for entry in entries:
        if not entry.loopback:
            yield (
                f"[[peer]] {entry.id}: host = {entry.host!r}: is reached from outside this machine, where anybody "
                "could read and speak; set transport.security = 'curve', or listen on loopback (127.0.0.0/8, ::1, "
                "localhost)"
            )


def _peer_mistakes(entries: list[PeerOverride], swarm: SwarmSection | None) -> Iterable[str]:
    ids: set[int] = set()
    addresses: dict[tuple[str, int], int] = {}
    coordinators = [entry.id for entry in entries if entry.role == "coordinator"]
    if len(coordinators) > 1:
        yield (
            f"[[peer]] {coordinators[1]}: role = 'coordinator': peer {coordinators[0]} is the coordinator already; "
            "a swarm has one at most"
        )
    elif coordinators and swarm and isinstance(swarm.participants, int) and swarm.participants >= swarm.peers:
        yield (
            f"swarm.participants = {swarm.participants}: are drawn from the clients, of which there are "
            f"{swarm.peers - 1} beside the coordinator; must be 'all' or at most that"
        )
    for entry in entries:
        if swarm and entry.id >= swarm.peers:
            allowed = f"with swarm.peers = {swarm.peers} the ids are 0 to {swarm.peers - 1}"
            yield f"[[peer]] {entry.id}: id = {entry.id}: there is no such peer; {allowed}"
        if entry.id in ids:
            yield f"[[peer]] {entry.id}: id = {entry.id}: has two entries; put all its keys into one"
        ids.add(entry.id)
        other = addresses.setdefault((entry.host, entry.port), entry.id)
        if entry.port and other != entry.id:
            yield (
                f"[[peer]] {entry.id}: port = {entry.port}: is the port of peer {other} on {entry.host} too; "
                "take another, or 0 for any free one"
            )
