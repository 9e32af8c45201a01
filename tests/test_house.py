"""The house rules that a machine can see: imports go one way, files stay short, types and style are clean."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ["topology", "transport", "peer", "launch"]
FILES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name.split(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield (node.module or "").split(".")[0]


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_one_way(room: str) -> None:
    above = set(ROOMS[ROOMS.index(room) + 1 :])
    if room in ("topology", "transport"):
        above |= {"torch", "torchvision"}
    wrong = [f"{path.relative_to(ROOT)} imports {name}" for path in FILES if path.is_relative_to(ROOT / room)
             for name in imported(path) if name in above]  # fmt: skip
    assert not wrong


def test_nothing_is_pickled() -> None:
    forbidden = {"pickle", "cloudpickle", "shelve", "marshal"}
    assert not [path for path in FILES if forbidden & set(imported(path))]


def test_files_are_short() -> None:
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    assert not {name: lines for name, lines in long.items() if lines > 400}


def test_every_module_says_what_it_is_for() -> None:
    assert not [path for path in FILES if not ast.get_docstring(ast.parse(path.read_text()))]


def test_every_package_is_installed() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    assert listed == {str(path.parent.relative_to(ROOT)).replace("/", ".") for path in FILES}


@pytest.mark.parametrize("command", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]])
def test_style_and_types(command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
