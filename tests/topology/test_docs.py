"""docs/topology-file.md names every key with its true default, and what it shows can be used as it stands."""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import tomli_w
from pydantic import BaseModel

from topology import Topology, faults, graphs, sections
from topology.file import dump

PAGE = (Path(__file__).parents[2] / "docs" / "topology-file.md").read_text("utf-8")
TOML_BLOCKS = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
GRAPHS = get_args(sections.Kind)
FAULTS = get_args(get_args(faults.Fault)[0])
OF_KINDS = {"[graph]": GRAPHS, "[[fault]]": FAULTS}  # sections whose keys depend on `kind`
TABLES: dict[str, list[type[BaseModel]]] = {
    "[swarm]": [sections.SwarmSection],
    "[graph]": list(GRAPHS),
    "[[edge]]": [sections.EdgeEntry],
    "[data]": [sections.DataSection],
    "[models]": [sections.ModelsSection],
    "[training]": [sections.TrainingSection],
    "[transport]": [sections.TransportSection],
    "[devices]": [sections.DevicesSection],
    "[[peer]]": [sections.PeerOverride],
    "[[fault]]": list(FAULTS),
}


def rows(title: str) -> dict[str, tuple[str, str]]:
    """The default and the allowed values of each key in the table of a section."""
    text = PAGE.split(f"## `{title}`\n")[1].split("\n## ")[0]
    table = text.split("| key | default | allowed | meaning |\n")[1].split("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:]]
    return {key.strip("`"): (default.strip("`"), allowed) for key, default, allowed, _ in cells}


def as_toml(value: object) -> str:
    lines = tomli_w.dumps({"x": value}).removeprefix("x = ").split("\n")
    return " ".join(line.strip() for line in lines).strip().replace("[ ", "[").replace(", ]", "]")


def choices(annotation: Any) -> list[str]:
    inner = [choice for part in get_args(annotation) for choice in choices(part)]
    return inner or ([annotation] if isinstance(annotation, str) else [])


def test_every_section_is_there() -> None:
    assert {*TABLES, "[method]"} == set(re.findall(r"^## `(.*)`$", PAGE, re.MULTILINE))
    assert {title.strip("[]") for title in (*TABLES, "[method]")} == set(Topology.model_fields)


@pytest.mark.parametrize("title", TABLES)
def test_every_key_has_a_row_with_its_default_and_its_choices(title: str) -> None:
    documented = rows(title)
    fields = {field.alias or name: field for model in TABLES[title] for name, field in model.model_fields.items()}
    assert list(documented) == list(fields) or title in OF_KINDS
    assert set(documented) == set(fields)
    written_out = tomllib.loads(dump(Topology()))[title.strip("[]")]
    defaults = written_out if isinstance(written_out, dict) else {}
    for key, field in fields.items():
        written, allowed = documented[key]
        if field.is_required():
            assert written == "required"
        elif key != "kind" and (default := field.get_default(call_default_factory=True)) is not None:
            assert written == as_toml(defaults.get(key, default))
        if title not in OF_KINDS:
            assert all(f'"{choice}"' in allowed for choice in choices(field.annotation))


@pytest.mark.parametrize("title", OF_KINDS)
def test_every_kind_has_a_row_with_its_keys(title: str) -> None:
    text = PAGE.split(f"## `{title}`\n")[1].split("\n## ")[0]
    found = re.findall(r'^\| `"([a-z_-]+)"`(?: \(default\))? \| .* \| (.*)\|$', text, re.MULTILINE)
    documented = {kind: {"kind", *re.findall(r"`(\w+)`", keys)} for kind, keys in found}
    models = {choices(model.model_fields["kind"].annotation)[0]: {*model.model_fields} for model in OF_KINDS[title]}
    of_all = set.intersection(*models.values()) - {"kind"}  # said once, above the table
    assert documented == {kind: keys - of_all for kind, keys in models.items()}
    assert all(f"`{key}`" in text for key in of_all)


@pytest.mark.parametrize("block", TOML_BLOCKS)
def test_every_example_is_a_swarm(load_text: Callable[..., Topology], tmp_path: Path, block: str) -> None:
    (edges,) = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "neighbors.txt").write_text(edges)
    topology = load_text(block)
    assert len(graphs.build(topology)) == topology.swarm.peers


def test_the_mistakes_shown_are_real() -> None:
    (shown,) = re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    mistakes = tomllib.loads(Path(__file__).with_name("mistakes.toml").read_text("utf-8"))
    assert set(shown.splitlines()) <= {mistake["refused"] for mistake in mistakes.values()}
