from collections.abc import Callable
from pathlib import Path

import pytest

from topology import Topology, TopologyError, graphs, load


@pytest.fixture
def load_text(tmp_path: Path) -> Callable[..., Topology]:
    """Load a topology file with this text, and these overrides."""

    def load_it(text: str, *overrides: str) -> Topology:
        file = tmp_path / "swarm.toml"
        file.write_text(text)
        return load(file, overrides)

    return load_it


@pytest.fixture
def refusal(load_text: Callable[..., Topology]) -> Callable[..., list[str]]:
    """The lines with which a file is refused, when it is read or when its graph is built."""

    def refuse(text: str, *overrides: str) -> list[str]:
        with pytest.raises(TopologyError) as caught:
            graphs.build(load_text(text, *overrides))
        return str(caught.value).splitlines()

    return refuse
