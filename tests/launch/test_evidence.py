"""A run with a coordinator is judged where it says, and shows its clients' local models, margins and features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from launch.evidence import draw_features, draw_margins, embed, local_models
from launch.figures import draw_accuracy, teacher_accuracy
from launch.report import write_report
from launch.results import Exit, load

STAR = '[graph]\nkind = "star"\n\n[data]\nheld_out = 0.0\npublic = 0.1\n\n[[peer]]\nid = 0\nrole = "coordinator"\n'
MakeRun = Callable[..., Any]


def seen(mean: float) -> dict[str, Any]:
    """Evidence of a client: all margins in the bin of their mean."""
    counts = np.histogram([mean] * 30, 50, (-1, 1))[0].tolist()
    return {
        "recognised": 0.6 + mean / 10,
        "margins_valid": counts,
        "margins_plain": counts[::-1],
        "mean_margin_valid": mean,
        "mean_margin_plain": -mean,
    }


def play(run: Any, *, evaluates: bool = True, killed: int | None = None) -> dict[str, Any]:
    """Two clients and a coordinator that is sure of the public samples and, in the end, of the test set."""
    for peer in range(3):
        run.start(peer, role="client" if peer else "coordinator", evaluates=evaluates and peer == 0)
    for number in range(1, run.rounds + 1):
        last = number == run.rounds
        if killed != 0:
            notes = {"teacher_accuracy": 0.5 + number / 10} if evaluates else {}
            run.round(0, number, overall=0.9 if last and evaluates else None, method=notes)
        for client in (1, 2):
            run.round(client, number, overall=0.1 * client, local=0.7 + 0.1 * client, evidence=seen(0.1 * number))
    for peer in range(3):
        if peer != killed:
            run.finish(peer)
    if killed is not None:
        return dict(run.close(status="failed", exits={killed: Exit(-9)}, reason="the coordinator, peer 0, is lost"))
    return dict(run.close())


def test_the_coordinators_accuracy_counts_and_the_clients_is_told_beside_it(make_run: MakeRun) -> None:
    summary = play(make_run(rounds=3, extra=STAR))
    assert summary["global_accuracy_of"] == "coordinator"
    assert summary["global_accuracy_by_round"] == [None, None, 0.9]
    assert summary["client_accuracy_by_round"] == pytest.approx([0.15] * 3)
    assert summary["local_accuracy"] == pytest.approx(0.85)
    assert (summary["selected_round"], summary["global_accuracy"]) == (3, 0.9)


def test_where_the_coordinator_is_idle_the_clients_mean_counts(make_run: MakeRun) -> None:
    summary = play(make_run(rounds=2, extra=STAR), evaluates=False)
    assert summary["global_accuracy_of"] == "peers"
    assert summary["global_accuracy"] == pytest.approx(0.15)


def test_a_run_without_its_coordinators_word_has_no_accuracy_of_another_kind(make_run: MakeRun) -> None:
    summary = play(make_run(rounds=2, extra=STAR), killed=0)
    assert summary["global_accuracy"] is None
    assert summary["global_accuracy_by_round"] == [None, None]
    assert summary["client_accuracy_by_round"] == pytest.approx([0.15] * 2)


def test_the_table_of_local_models_has_the_first_and_the_last_round(make_run: MakeRun) -> None:
    run = make_run(rounds=3, extra=STAR)
    play(run)
    table = str(local_models(load(run.path)))
    assert "after round 1" in table and "after round 3" in table and "after round 2" not in table
    assert "0.850 ± 0.071" in table  # local, of 0.8 and 0.9
    assert "0.630 ± 0.000" in table  # recognised in round 3
    assert "-0.300 ± 0.000" in table


def test_the_margins_of_all_clients_are_in_one_histogram_a_round(make_run: MakeRun) -> None:
    run = make_run(rounds=3, extra=STAR)
    play(run)
    figure = draw_margins(load(run.path))
    assert figure is not None
    assert [axes.get_ylabel() for axes in figure.axes] == ["test samples, round 1", "test samples, round 3"]
    valid = figure.axes[1].patches[0].get_data()  # type: ignore[attr-defined]
    assert valid.values.max() == 60
    assert valid.edges[valid.values.argmax()] == pytest.approx(0.28)
    labels = [text.get_text() for text in figure.axes[1].get_legend().get_texts()]  # type: ignore[union-attr]
    assert labels == ["valid, mean +0.300", "plain, mean -0.300"]


def test_the_accuracy_figure_tells_coordinator_teacher_and_clients_apart(make_run: MakeRun) -> None:
    run = make_run(rounds=3, extra=STAR)
    play(run)
    loaded = load(run.path)
    assert teacher_accuracy(loaded) == pytest.approx([0.6, 0.7, 0.8])
    figure = draw_accuracy(loaded)
    assert figure is not None
    lines = {str(line.get_label()): list(line.get_ydata()) for line in figure.axes[0].lines}
    assert lines["clients, mean"] == pytest.approx([0.15] * 3)
    assert lines["teacher, public"] == pytest.approx([0.6, 0.7, 0.8])
    assert lines["coordinator"] == [0.9]


def test_classes_that_are_apart_have_a_high_silhouette_and_others_have_not() -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(3), 20)
    noise = rng.normal(size=(60, 8))
    _, apart = embed(noise + 20 * np.eye(3, 8)[labels], labels)
    places, mixed = embed(noise, labels)
    assert places.shape == (60, 2)
    assert apart > 0.5 > 0.2 > mixed


def test_features_are_drawn_where_the_coordinator_kept_them_and_the_page_holds_all(make_run: MakeRun) -> None:
    run = make_run(rounds=2, extra=STAR)
    play(run)
    assert draw_features(load(run.path)) is None
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(3), 10)
    values = rng.normal(size=(30, 8)).astype(np.float32)
    values[:, 0] = 1.0  # a feature that never changes must not break the whitening
    save_file({"labels": labels, "client": values, "together": values}, run.path / "peers/0/features.safetensors")
    figure = draw_features(load(run.path))
    assert figure is not None
    assert [axes.get_xlabel().split(":")[0] for axes in figure.axes] == ["client", "together"]
    page = write_report(run.path).read_text(encoding="utf-8")
    assert "Local models" in page and "Decision margins" in page and "What is seen in the test images" in page
    assert "at the coordinator; its clients alone" in page
    assert {"margins.png", "features.png"} <= {path.name for path in (run.path / "figures").iterdir()}
