"""Draws the graph of a swarm as a PNG picture; nothing of matplotlib's global state is used or changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from topology.errors import TopologyError

if TYPE_CHECKING:
    import networkx as nx

CIRCLE_FROM = 61  # peers; a layout that follows the edges takes too long for more


def draw(graph: nx.DiGraph[int], path: str | Path, models: Sequence[str]) -> None:
    """Draw peers as circles, colored by the name of their model; edges that go one way only have an arrow."""
    import networkx as nx
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    side = 6 + len(graph) / 20
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_aspect("equal")
    layout = nx.circular_layout if len(graph) >= CIRCLE_FROM else nx.kamada_kawai_layout
    places = layout(graph.to_undirected())
    names = sorted(set(models))
    colors = {name: colormaps["tab20"](i % 20) for i, name in enumerate(names)}
    one_way = [(i, j) for i, j in graph.edges if not graph.has_edge(j, i)]
    both_ways = [(i, j) for i, j in graph.edges if i < j and graph.has_edge(j, i)]
    for edges, arrows in ((one_way, True), (both_ways, False)):
        nx.draw_networkx_edges(
            graph, places, ax=axes, edgelist=edges, arrows=arrows, edge_color="#888888", alpha=0.6,
            **({"node_size": 300, "arrowsize": 12} if arrows else {}),
        )  # fmt: skip
    nx.draw_networkx_nodes(graph, places, ax=axes, node_color=[colors[name] for name in models], node_size=300)
    nx.draw_networkx_labels(graph, places, ax=axes, font_size=8)
    dots = [Line2D([], [], marker="o", linestyle="", color=colors[name], label=name) for name in names]
    figure.legend(handles=dots, loc="outside lower center", ncols=min(4, len(dots)), frameon=False)
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise TopologyError(f"the picture {str(path)!r} cannot be written: {error.strerror}") from error
