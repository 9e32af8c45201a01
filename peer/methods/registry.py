"""Finds methods by name or as `package.module:Class`, and checks their settings."""

import inspect
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from peer import own_code
from peer.methods.base import Method
from topology.errors import TopologyError
from topology.mistakes import suggestion

METHODS = {
    "crad": "peer.methods.crad:Crad",
    "agreement": "peer.methods.agreement:Agreement",
    "uniform": "peer.methods.uniform:Uniform",
    "uncertainty": "peer.methods.uncertainty:Uncertainty",
    "dpsgd": "peer.methods.dpsgd:DPsgd",
    "local": "peer.methods.local:Local",
    "fedcc": "peer.methods.fedcc:FedCc",
    "fedavg": "peer.methods.fedavg:FedAvg",
    "fedmd": "peer.methods.fedmd:FedMd",
    "feddf": "peer.methods.feddf:FedDf",
    "feddf-logits": "peer.methods.feddf:FedDfLogits",
    "fedct": "peer.methods.fedct:FedCt",
    "ssl": "peer.methods.ssl:Ssl",
    "fedbst": "peer.methods.fedbst:FedBst",
    "fedcopl": "peer.methods.fedbst:FedCoPl",
    "promptfl": "peer.methods.promptfl:PromptFl",
    "promptprox": "peer.methods.promptfl:PromptProx",
    "zeroshot": "peer.methods.zeroshot:ZeroShot",
}


def find(name: str) -> type[Method]:
    """The class of a method. Raises `TopologyError` saying what there is."""
    path = METHODS.get(name, name)
    if ":" not in path:
        raise TopologyError(
            f"method.name: there is no method {name!r}.{suggestion(name, METHODS)} There are {', '.join(METHODS)}, "
            "and any package.module:Class that derives from peer.methods.base.Method"
        )
    try:
        found = own_code.load(path)
    except own_code.OwnCodeError as error:
        raise TopologyError(f"method.name: cannot load {name!r}: {error}") from error
    if not (inspect.isclass(found) and issubclass(found, Method)):
        raise TopologyError(f"method.name: {name!r} is not a class that derives from peer.methods.base.Method")
    return found


def make(name: str, options: Mapping[str, Any]) -> Method:
    """A method with its settings checked and its defaults filled in."""
    found = find(name)
    try:
        return found(found.settings_type.model_validate(dict(options)))
    except ValidationError as error:
        keys = ", ".join(found.settings_type.model_fields) or "no keys"
        lines = []
        for entry in error.errors():
            key = ".".join(["method", *map(str, entry["loc"])])
            if entry["type"] == "extra_forbidden":
                lines.append(f"{key}: the method {name!r} has no such key. It takes: {keys}")
            else:
                lines.append(f"{key}: {entry['input']!r} is not allowed: {entry['msg'].lower()}")
        raise TopologyError("\n".join(lines)) from error
