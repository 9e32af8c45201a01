"""Turns pydantic's errors into sentences, one a mistake: the key, what was given, what is allowed."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

Node = dict[str, Any]  # of the JSON schema
Path = tuple[str | int, ...]

LISTS = ("peer", "edge", "fault")  # written as [[peer]], [[edge]], [[fault]]
BOUNDS = {
    "minimum": ", at least",
    "exclusiveMinimum": " above",
    "maximum": ", at most",
    "exclusiveMaximum": " below",
}


def sentences(error: ValidationError, model: type[BaseModel], data: Mapping[str, Any]) -> list[str]:
    """Say each mistake in a sentence of its own, in the order of the model's keys."""
    guide = _Guide(model.model_json_schema(), data)
    found: dict[Path, str] = {}
    for mistake in error.errors(include_url=False):
        path, sentence = guide.explain(mistake)
        found.setdefault(path, sentence)
    # A value that fits no branch of a union fails once for each; the mistake farthest inside is the real one.
    return [text for path, text in found.items() if not any(path == other[: len(path)] != other for other in found)]


def shown(value: object) -> str:
    """Spell a value the way it is written in TOML, shortened if need be."""
    match value:
        case bool():
            text = str(value).lower()
        case list():
            text = f"[{', '.join(map(shown, value))}]"
        case dict():
            text = f"{{{', '.join(f'{key} = {shown(item)}' for key, item in value.items())}}}"
        case str() | int() | float():
            text = repr(value)
        case _:  # dates and times
            text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def suggestion(word: str, known: Iterable[str]) -> str:
    """The words " Did you mean …?" where one of the known names is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {close[0]}?" if close else ""


class _Guide:
    """Finds its way in the schema and in what the user wrote."""

    def __init__(self, schema: Node, data: Mapping[str, Any]) -> None:
        self.schema = schema
        self.data = data

    def explain(self, mistake: Mapping[str, Any]) -> tuple[Path, str]:
        path, node = self._trace(mistake["loc"])
        key, given = self._key(path), shown(mistake["input"])
        match mistake["type"]:
            case "extra_forbidden":
                return path, self._unknown(path, node, given)
            case "missing":
                return path, f"{key} is missing: it must be {self._allowed(node)}"
            case "union_tag_invalid":
                kinds = [branch["properties"]["kind"]["const"] for branch in self._branches(node)]
                path = (*path, "kind")
                return path, self._refused(self._key(path), mistake["input"]["kind"], _one_of(kinds), kinds)
            case "union_tag_not_found":
                kinds = [branch["properties"]["kind"]["const"] for branch in self._branches(node)]
                path = (*path, "kind")
                return path, f"{self._key(path)} is missing: it must be {_one_of(kinds)}"
            case "value_error":
                text = str(mistake["ctx"]["error"])
                # What is checked between several keys names them itself.
                return path, text if len(path) == 1 else f"{key} = {given}: {text}"
        if len(path) == 1:
            what = "one or more tables, each" if path[0] in LISTS else "one section,"
            return path, f"{key} = {given}: must be {what} with its keys in the lines below {_header(key)}"
        choices = [choice for branch in self._branches(node) for choice in _choices(branch)]
        return path, self._refused(key, mistake["input"], self._allowed(node), choices)

    def _refused(self, key: str, value: object, allowed: str, choices: Iterable[str]) -> str:
        near = suggestion(value, choices) if isinstance(value, str) else ""
        return f"{key} = {shown(value)}: must be {allowed}" + (f".{near}" if near else "")

    def _branches(self, node: Node) -> list[Node]:
        """All concrete schemas a value may follow here."""
        if "$ref" in node:
            return self._branches(self.schema["$defs"][node["$ref"].rsplit("/", 1)[1]])
        inner = [branch for word in ("anyOf", "oneOf", "allOf") for branch in node.get(word, ())]
        return [leaf for branch in inner for leaf in self._branches(branch)] if inner else [node]

    def _trace(self, loc: Sequence[str | int]) -> tuple[Path, Node]:
        """Split pydantic's location into the path in the file, without its names for the branches of unions."""
        path: list[str | int] = []
        node = self.schema
        for part in loc:
            kinds = node.get("discriminator", {}).get("mapping", {})
            if part in kinds:
                node = {"$ref": kinds[part]}
                continue
            branches = self._branches(node)
            step = "items" if isinstance(part, int) else "properties"
            below = [branch[step] for branch in branches if step in branch]
            if isinstance(part, str):
                below = [properties[part] for properties in below if part in properties]
            if below:
                node = below[0]
            elif not any(branch.get("additionalProperties") is False for branch in branches):
                continue  # the name of a branch
            path.append(part)
        return tuple(path), node

    def _key(self, path: Path) -> str:
        """Spell a path: `section.key`, `models.pool[1]`, `[[peer]] 3: model`."""
        head, rest = str(path[0]), path[1:]
        if head in LISTS and rest and isinstance(rest[0], int):
            entry = self.data[head][rest[0]]
            label = _label(head, entry) or f"number {rest[0] + 1}"
            head, rest = f"[[{head}]] {label}:", rest[1:]
            return f"{head} {_dotted(rest)}" if rest else head[:-1]
        return f"{head}{'' if not rest or isinstance(rest[0], int) else '.'}{_dotted(rest)}"

    def _unknown(self, path: Path, owner: Node, given: str) -> str:
        word, key = str(path[-1]), self._key(path)
        sections: Node = self.schema["properties"]
        if len(path) == 1:
            near = suggestion(word, sections)
            there = f"There are {', '.join(map(_header, sections))}"
            if isinstance(self.data[word], dict | list):
                return f"[{word}]: there is no such section.{near} {there}"
            return f"{word} = {given}: stands outside every section.{self._elsewhere(word) or near} {there}"
        (table,) = self._branches(owner)
        known = list(table["properties"])
        near = suggestion(word, known) or self._elsewhere(word)
        kind = table["properties"].get("kind", {}).get("const") if path[0] in ("graph", "fault") else None
        of = "graph.kind" if path[0] == "graph" else "a fault of kind"
        what = f"{of} = {kind!r} has no such key" if kind else "there is no such key"
        return f"{key} = {given}: {what}.{near} Allowed: {', '.join(known)}"

    def _elsewhere(self, word: str) -> str:
        """The section where a key would be known."""
        for name, section in self.schema["properties"].items():
            tables = [
                table for branch in self._branches(section) for table in self._branches(branch.get("items", branch))
            ]
            owners = [table for table in tables if word in table.get("properties", {})]
            kinds = [owner["properties"]["kind"]["const"] for owner in owners if name == "graph"]
            if kinds:
                return f" It belongs to graph.kind = {' or '.join(map(repr, kinds))}."
            if owners:
                return f" It belongs to {_header(name)}."
        return ""

    def _allowed(self, node: Node) -> str:
        """Say which values a schema takes."""
        if "description" in node and node.get("type") != "object":
            return str(node["description"])
        branches = node.get("anyOf") or self._branches(node)
        if branches == [node]:
            return _describe(node)
        return " or ".join(self._allowed(branch) for branch in branches if branch.get("type") != "null")


def _describe(branch: Node) -> str:
    choices = _choices(branch)
    if choices:
        return _one_of(choices)
    match branch.get("type"):
        case "integer" | "number" as kind:
            return ("a whole number" if kind == "integer" else "a number") + _range(branch)
        case "boolean":
            return "true or false"
        case "object":
            return "a table"
        case _:
            return "text in quotes" + (", not empty" if branch.get("minLength") else "")


def _range(branch: Node) -> str:
    bounds = {word: f"{branch[word]}".removesuffix(".0") for word in BOUNDS if word in branch}
    if {"minimum", "maximum"} <= bounds.keys():
        return f" from {bounds['minimum']} to {bounds['maximum']}"
    return " and".join(f"{BOUNDS[word]} {bound}" for word, bound in bounds.items()).replace("and,", "and")


def _choices(branch: Node) -> list[str]:
    return list(branch.get("enum", [branch["const"]] if "const" in branch else []))


def _one_of(choices: Sequence[str]) -> str:
    return f"{'one of ' if len(choices) > 1 else ''}{', '.join(map(repr, choices))}"


def _header(name: str) -> str:
    return f"[[{name}]]" if name in LISTS else f"[{name}]"


def _label(head: str, entry: object) -> str:
    names, kind = (("from", "to"), int) if head == "edge" else (("id",), int if head == "peer" else str)
    ends = [entry.get(name) for name in names] if isinstance(entry, dict) else [None]
    return " -> ".join(map(str, ends)) if all(isinstance(end, kind) for end in ends) else ""


def _dotted(parts: Path) -> str:
    return re.sub(r"\.\[", "[", ".".join(f"[{part}]" if isinstance(part, int) else part for part in parts))
