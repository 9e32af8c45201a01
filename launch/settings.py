"""Every setting of a topology file under its dotted key, and those in which two files differ."""

from collections.abc import Mapping
from typing import Any

from topology import Topology


def flatten(plan: Topology) -> dict[str, Any]:
    """Every setting under its dotted key, less the run's name, which changes nothing."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else key, inner)
        else:
            flat[prefix] = value

    walk("", plan.model_dump())
    flat.pop("swarm.name")
    return flat


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Of each flat setting in which the two differ, what each says."""

    def shown(settings: Mapping[str, Any], key: str) -> str:
        return repr(settings[key]) if key in settings else "not set"

    both = {key: (shown(first, key), shown(second, key)) for key in dict.fromkeys([*first, *second])}
    return {key: values for key, values in both.items() if values[0] != values[1]}
