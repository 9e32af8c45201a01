from pathlib import Path

import matplotlib as mpl
import pytest
from matplotlib.image import imread

from topology import Topology, TopologyError, graphs
from topology.drawing import draw


@pytest.mark.parametrize(
    ("peers", "kind"), [(2, "line"), (10, "complete"), (12, "exponential"), (40, "tree"), (100, "k-regular")]
)
def test_every_model_has_its_color_in_the_picture(tmp_path: Path, peers: int, kind: str) -> None:
    swarm = Topology.model_validate({"swarm": {"peers": peers}, "graph": {"kind": kind}})
    backend = mpl.get_backend()
    draw(graphs.build(swarm), tmp_path / "graph.png", [swarm.model_of(i).name for i in range(peers)])
    picture = imread(tmp_path / "graph.png")
    seen = {
        tuple(pixel) for pixel in (picture.reshape(-1, picture.shape[-1])[:, :3] * 255).round().astype(int).tolist()
    }
    colors = [mpl.colormaps["tab20"](i, bytes=True)[:3] for i in range(4)]
    assert [tuple(map(int, color)) in seen for color in colors] == [i < min(peers, 3) for i in range(4)]
    assert mpl.get_backend() == backend


def test_peers_that_cannot_reach_one_another_are_drawn_too(tmp_path: Path) -> None:
    edges = [{"from": 0, "to": 1}, {"from": 2, "to": 3}]
    swarm = Topology.model_validate({"swarm": {"peers": 4}, "graph": {"kind": "edges"}, "edge": edges})
    draw(graphs.build(swarm), tmp_path / "graph.png", ["cnn6"] * 4)
    assert imread(tmp_path / "graph.png").size


def test_a_picture_that_cannot_be_written_is_said_so(tmp_path: Path) -> None:
    swarm = Topology.model_validate({"swarm": {"peers": 2}})
    path = tmp_path / "nowhere" / "graph.png"
    with pytest.raises(TopologyError) as caught:
        draw(graphs.build(swarm), path, ["cnn6"] * 2)
    assert str(caught.value) == f"the picture {str(path)!r} cannot be written: No such file or directory"
