"""What a run with a coordinator shows beyond accuracy: its clients' local models, their margins, and what is seen."""

from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load_file

from launch import page
from launch.figures import BLUE, LIGHT, ORANGE, Drawing, blank, legend_above
from launch.journals import Event
from launch.page import Html
from launch.results import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _tested(run: Run) -> dict[int, list[Event]]:
    """The clients' rounds that hold evidence: of the first such round, before anybody was taught, and of the last."""
    by_round: dict[int, list[Event]] = {}
    for event in run.journals.rounds:
        if event.get("evidence"):
            by_round.setdefault(event["round"], []).append(event)
    return {number: by_round[number] for number in sorted(by_round) if number in (min(by_round), max(by_round))}


def local_models(run: Run) -> Html:
    """Table II of the FedCC paper: how good the clients' own models are, each alone, as means over the clients."""
    tested = _tested(run)
    if not tested:
        return Html("")

    def mean(events: list[Event], value: Any) -> str:
        values = [value(event) for event in events]
        spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
        return f"{np.mean(values):.3f} ± {spread:.3f}"

    rows = [
        [
            f"after round {number}",
            len(events),
            mean(events, lambda event: event["local_accuracy"]),
            mean(events, lambda event: event["evidence"]["recognised"]),
            mean(events, lambda event: event["global_accuracy"]),
            mean(events, lambda event: event["evidence"]["mean_margin_valid"]),
            mean(events, lambda event: event["evidence"]["mean_margin_plain"]),
        ]
        for number, events in tested.items()
    ]
    headers = ["models", "clients", "local", "global", "global, plain", "margin", "margin, plain"]
    note = (
        "Each client's own model alone; mean and standard deviation over the clients. Local: on test samples "
        "distributed like the client's own. Global: on all test samples, where “unknown” is right for a class of which "
        "the client holds at most 2 % (models without an unknown never say it); plain: where it is not. Margin: score "
        "of the right answer less that of the best wrong one. In the first round nobody has been taught yet."
    )
    return page.join(
        [page.heading("Local models"), page.table(headers, rows, left=1), page.paragraph(note, quiet=True)]
    )


def draw_margins(run: Run) -> "Figure | None":
    """Decision margins on the common test set, pooled over the clients (Figure 2 of the FedCC paper)."""
    tested = _tested(run)
    if not tested:
        return None
    figure = blank(2.9 * len(tested))
    panels = figure.subplots(len(tested), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
    for axes, (number, events) in zip(panels, tested.items(), strict=True):
        for rule, color, line in (("valid", BLUE, "-"), ("plain", ORANGE, "--")):
            counts = np.sum([event["evidence"][f"margins_{rule}"] for event in events], axis=0)
            mean = float(np.mean([event["evidence"][f"mean_margin_{rule}"] for event in events]))
            edges = np.linspace(-1, 1, len(counts) + 1)
            axes.stairs(np.maximum(counts, 0.5), edges, color=color, linestyle=line, linewidth=1.6, baseline=0.5)
            axes.plot([], [], color=color, linestyle=line, label=f"{rule}, mean {mean:+.3f}")
        axes.axvline(0, color=LIGHT, linewidth=1.0, zorder=0)
        axes.set_yscale("log")
        axes.set(ylabel=f"test samples, round {number}")
        legend_above(axes, 2, "lower left")
    panels[-1].set(xlabel="margin: right answer less the best wrong one")
    return figure


def draw_features(run: Run) -> "Figure | None":
    """What one client sees in the test images and what all see together (Figure 3 of the FedCC paper)."""
    path = run.path / "peers" / str(run.topology.coordinator) / "features.safetensors"
    if not path.exists():
        return None
    kept = load_file(path)
    labels = kept.pop("labels")
    figure = blank(3.3)
    panels = figure.subplots(1, len(kept), squeeze=False)[0]
    for axes, (name, values) in zip(panels, sorted(kept.items()), strict=True):
        places, score = embed(values, labels)
        axes.scatter(*places.T, c=labels, cmap="tab10" if labels.max() < 10 else "nipy_spectral", s=5, linewidths=0)
        axes.set(xticks=[], yticks=[], xlabel=f"{name}: silhouette {score:+.2f}")
    return figure


def embed(values: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, float]:
    """PCA with whitening, then t-SNE to the plane; and how well the classes are apart in it (silhouette, -1 to 1)."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE
    from sklearn.metrics import silhouette_score

    values = np.asarray(values, dtype=np.float64)
    varying = values[:, values.std(axis=0) > 0]
    components = min(50, *varying.shape)
    whitened = PCA(components, whiten=True, svd_solver="full").fit_transform(varying)
    perplexity = min(30.0, (len(values) - 1) / 3)
    places = TSNE(2, perplexity=perplexity, init="pca", random_state=0).fit_transform(whitened)
    return places, float(silhouette_score(places, labels))


EVIDENCE = (
    Drawing(
        "margins",
        "Decision margins",
        "Of the clients' own models on the common test set, all clients together; softmax scores, log scale. Valid: "
        "for a class of which a client holds at most 2 %, “unknown” is a right answer too. Plain: always a wrong one.",
        draw_margins,
    ),
    Drawing(
        "features",
        "What is seen in the test images",
        "Each dot a test image, each colour a class: PCA with whitening, then t-SNE. Client: the features of "
        "one client's model. Together: what the coordinator's model sees, or what all clients' models say together.",
        draw_features,
    ),
)
