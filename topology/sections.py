"""Every key of a topology file with its type, default and range; what these accept, a swarm can be built from.

Units are in the names (`_s` seconds, `_bytes` bytes). Ranges that depend on another section are in `file.py`,
those that depend on the graph in `graphs.py`, and what needs torch (models, data sets, methods) in `peer`.
"""

import ipaddress
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    field_validator,
    model_validator,
)

from topology.errors import raise_any

MAX_PEERS = 1000

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[float, Field(gt=0, le=1)]
Name = Annotated[str, Field(min_length=1)]
Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:[0-9]+)?)$", description="'cpu', or 'cuda:0', 'cuda:1', …")]


class Section(BaseModel):
    """A part of the file: its keys are checked strictly and cannot be changed afterwards."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Named(Section):
    """Something chosen by name, with options that whoever knows the name will check."""

    name: Name
    options: dict[str, Any] = Field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.name, *sorted(self.options)))


class ModelSpec(Named):
    """A model: a name of the registry or `package.module:callable`, and its options."""


class MethodSection(Named):
    """`[method]`: a name of the registry or `package.module:Class`; every other key is an option."""

    name: Name = "crad"


def _gather_options(value: object) -> object:
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, dict):
        options = {key: option for key, option in value.items() if key != "name"}
        return {"options": options} | ({"name": value["name"]} if "name" in value else {})
    return value


def _spread_options(value: Named) -> dict[str, Any]:
    # TOML has no null: an option that is None is one that was not given.
    return {"name": value.name} | {key: option for key, option in value.options.items() if option is not None}


def _model_as_toml(value: ModelSpec | None) -> object:
    return value and (_spread_options(value) if value.options else value.name)


Model = Annotated[
    ModelSpec,
    BeforeValidator(_gather_options),
    PlainSerializer(_model_as_toml),
    Field(description="a model's name, or a table such as {name = 'resnet8', width = 16}"),
]
Method = Annotated[MethodSection, BeforeValidator(_gather_options), PlainSerializer(_spread_options)]


class SwarmSection(Section):
    """`[swarm]`: how many peers, how long, from which seed."""

    name: str = Field(
        "swarm",
        pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}$",
        description="text in quotes: 1 to 64 letters, digits, '_', '-' or '.', not starting with '.'",
    )
    peers: int = Field(10, ge=1, le=MAX_PEERS)
    rounds: Count = 300
    seed: int = Field(1024, ge=0, le=2**63 - 1)
    participants: Literal["all"] | Count = "all"
    round_deadline_s: Seconds = 300.0

    @model_validator(mode="after")
    def _participants_exist(self) -> Self:
        if isinstance(self.participants, int) and self.participants > self.peers:
            raise ValueError(
                f"swarm.participants = {self.participants}: must be 'all' or a whole number from 1 to "
                f"{self.peers}, as swarm.peers = {self.peers}"
            )
        return self


class CompleteGraph(Section):
    """Everyone is everyone's neighbor."""

    kind: Literal["complete"] = "complete"


class RingGraph(Section):
    """Peer i and peer i + 1 are neighbors, and so are the last and the first."""

    kind: Literal["ring"] = "ring"


class LineGraph(Section):
    """Peer i and peer i + 1 are neighbors."""

    kind: Literal["line"] = "line"


class StarGraph(Section):
    """The coordinator, or peer 0 where there is none, is everyone's only neighbor."""

    kind: Literal["star"] = "star"


class TreeGraph(Section):
    """A full tree, filled level by level from peer 0."""

    kind: Literal["tree"] = "tree"
    branching: Count = 2


class KRegularGraph(Section):
    """A random connected graph in which every peer has the same number of neighbors."""

    kind: Literal["k-regular"] = "k-regular"
    degree: Count = 4


class SmallWorldGraph(Section):
    """A connected Watts-Strogatz graph: a ring of near neighbors, some edges of it rewired at random."""

    kind: Literal["small-world"] = "small-world"
    degree: Count = 4
    rewire: Fraction = 0.1


class ErdosRenyiGraph(Section):
    """A random connected graph in which every edge exists with the same probability."""

    kind: Literal["erdos-renyi"] = "erdos-renyi"
    probability: Weight = 0.3


class ExponentialGraph(Section):
    """Peer i sends to i + 1, i + 2, i + 4, …, counted around the circle: directed."""

    kind: Literal["exponential"] = "exponential"


class EdgesGraph(Section):
    """The `[[edge]]` entries of the file."""

    kind: Literal["edges"] = "edges"
    directed: bool = False


class FileGraph(Section):
    """An edge list in a file of its own, in the format of networkx."""

    kind: Literal["file"] = "file"
    path: Name
    directed: bool = False


def _complete_unless_said(value: object) -> object:
    return {"kind": "complete", **value} if isinstance(value, dict) else value


Kind = (
    CompleteGraph | RingGraph | LineGraph | StarGraph | TreeGraph | KRegularGraph | SmallWorldGraph
    | ErdosRenyiGraph | ExponentialGraph | EdgesGraph | FileGraph
)  # fmt: skip


def is_directed(graph: Kind) -> bool:
    """Whether an edge from i to j says nothing of one from j to i."""
    return graph.kind == "exponential" or getattr(graph, "directed", False)


Graph = Annotated[Kind, Field(discriminator="kind"), BeforeValidator(_complete_unless_said)]


class DataSection(Section):
    """`[data]`: which data set, and how it is dealt to the peers."""

    name: Name = "digits"
    root: str = ""
    partition: Literal["dirichlet", "dirichlet-capped", "pathological", "quantity", "iid"] = "dirichlet"
    alpha: float = Field(0.3, gt=0)
    classes_per_peer: Count = 2
    min_samples: Count = 10
    public: float = Field(0.0, ge=0, lt=1)
    held_out: float = Field(0.2, ge=0, lt=1)
    test: Literal["common", "dealt"] = "common"
    augment: Literal["auto", "none", "flip", "crop-flip"] = "auto"


class ModelsSection(Section):
    """`[models]`: peer i has the model `pool[i mod len(pool)]`."""

    pool: list[Model] = Field(
        default_factory=lambda: [ModelSpec(name=name) for name in ("resnet18", "resnet18_half", "cnn6")],
        min_length=1,
        description="a list of one or more models, each a name or a table such as {name = 'resnet8', width = 16}",
    )


class TrainingSection(Section):
    """`[training]`: what a peer does with its own data in a round."""

    epochs: Count = 1
    batch_size: Count = 64
    optimizer: Literal["sgd", "adam"] = "sgd"
    learning_rate: float = Field(0.01, gt=0)
    momentum: float = Field(0.9, ge=0, lt=1)
    weight_decay: float = Field(5e-4, ge=0)
    schedule: Literal["cosine", "constant"] = "cosine"
    test_every: Count = 1


class TransportSection(Section):
    """`[transport]`: how snapshots travel, and when a neighbor counts as gone."""

    kind: Literal["tcp", "ipc"] = "tcp"
    security: Literal["none", "curve"] = "none"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    piece_bytes: int = Field(1_048_576, ge=4096, le=1_048_576)
    window: Count = 4
    concurrent: Count = 2
    beat_s: Seconds = 1.0
    suspect_s: Seconds = 5.0
    dead_s: Seconds = 15.0
    disconnected_s: Seconds = 2.0
    retry_s: Seconds = 0.5
    retry_max_s: Seconds = 5.0
    attempts: Count = 5
    drain_s: Seconds = 5.0

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        raise_any(
            f"transport.{later} = {getattr(self, later)}: must be longer than "
            f"transport.{sooner} = {getattr(self, sooner)}"
            for sooner, later in (("beat_s", "suspect_s"), ("suspect_s", "dead_s"))
            if getattr(self, later) <= getattr(self, sooner)
        )
        if self.retry_max_s < self.retry_s:
            raise ValueError(
                f"transport.retry_max_s = {self.retry_max_s}: must be at least transport.retry_s = {self.retry_s}"
            )
        return self


class DevicesSection(Section):
    """`[devices]`: what the peers compute on."""

    assign: Literal["auto"] | Device | Annotated[list[Device], Field(min_length=1)] = Field(
        "auto", description="'auto', a device ('cpu', 'cuda:0'), or a list of devices dealt round robin"
    )
    threads: Literal["auto"] | Count = "auto"


class PeerOverride(Section):
    """`[[peer]]`: what is special about one peer; a key that is left out follows the sections above."""

    id: int = Field(ge=0)
    role: Literal["client", "coordinator"] = "client"
    model: Model | None = None
    device: Device | None = None
    threads: Count | None = None
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)

    @field_validator("host")
    @classmethod
    def _address(cls, host: str) -> str:
        try:
            ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
        except ValueError:
            raise ValueError("must be an IP address of this machine, or localhost") from None
        return host

    @property
    def loopback(self) -> bool:
        return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback


class EdgeEntry(Section):
    """`[[edge]]`: one edge of a graph of kind "edges", or the mixing weight of an edge of another kind."""

    sender: int = Field(ge=0, alias="from")
    receiver: int = Field(ge=0, alias="to")
    weight: Weight | None = None
