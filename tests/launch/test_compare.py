"""Runs side by side: the numbers of their summaries, honest means, and every setting that differs."""

import math

import pytest
from rich.console import Console

from launch.compare import MEASURES, compare
from launch.results import RunFolderError


def finished(make_run, name, *, accuracy=0.5, status="complete", wall_s=10.0, **settings):
    """A run of one round with two peers and 2 MB of payload."""
    run = make_run(name, peers=2, rounds=1, **settings)
    for peer in range(2):
        run.round(peer, 1, validation=0.5, local=accuracy + 0.1, overall=accuracy)
        run.deliver(peer, 1, 1 - peer, payload=1_000_000, parts_ms=(1.0, 2.0, 3.0, 0.0, 4.0))
        run.book(peer, (1 - peer, 1, 1_000_000, 1_250_000, 0))
        run.finish(peer, peak_rss_mb=200.0 + peer)
    run.close(status=status, wall_s=wall_s)
    return run.path


def show(comparison, width=80):
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(comparison.table(), crop=False)
    return capture.get()


def test_a_row_holds_the_summarys_numbers_in_the_units_of_the_table(make_run):
    folder = finished(make_run, "one", accuracy=0.25, wall_s=12.5, seed=7)
    (row,) = compare([folder]).rows
    assert (row.run, row.method, row.seed, row.status, row.selected_round) == (
        "one",
        "crad",
        7,
        "complete",
        1,
    )
    assert row.measures == pytest.approx(
        {
            "global_accuracy": 0.25,
            "local_accuracy": 0.35,
            "payload_mb": 2.0,
            "stream_mb": 2.5,
            "latency_p50_ms": 10.0,
            "wall_s": 12.5,
            "peak_rss_mb": 201.0,
        }
    )
    assert tuple(row.measures) == MEASURES


def test_runs_equal_but_for_the_seed_get_mean_and_standard_error(make_run):
    folders = [finished(make_run, f"s{seed}", accuracy=seed / 10, seed=seed) for seed in (1, 2, 6)]
    comparison = compare(folders)
    (mean,) = comparison.means
    assert (mean.method, mean.seeds) == ("crad", (1, 2, 6))
    # 0.1, 0.2, 0.6: mean 0.3; squared deviations 0.04 + 0.01 + 0.09, over n - 1 = 2, over n = 3.
    assert mean.measures["global_accuracy"] == pytest.approx((0.3, math.sqrt(0.14 / 2 / 3)))
    assert mean.measures["payload_mb"] == pytest.approx((2.0, 0.0))
    assert comparison.notes == ()


def test_methods_are_averaged_apart_and_in_the_order_given(make_run):
    folders = [
        finished(
            make_run,
            f"{method}-{seed}",
            accuracy=accuracy + seed / 10,
            seed=seed,
            extra=f'[method]\nname = "{method}"\n',
        )
        for method, accuracy in (("uniform", 0.3), ("crad", 0.5))
        for seed in (1, 2)
    ]
    comparison = compare(folders)
    assert [(mean.method, mean.measures["global_accuracy"][0]) for mean in comparison.means] == [
        ("uniform", pytest.approx(0.45)),
        ("crad", pytest.approx(0.65)),
    ]
    assert [row.run for row in comparison.rows] == ["uniform-1", "uniform-2", "crad-1", "crad-2"]
    assert comparison.notes == ()


def test_only_complete_runs_and_no_seed_twice_enter_a_mean_and_a_note_says_so(make_run):
    folders = [
        finished(make_run, "a", accuracy=0.2, seed=1),
        finished(make_run, "b", accuracy=0.4, seed=2),
        finished(make_run, "c", accuracy=0.9, seed=2),
        finished(make_run, "d", accuracy=0.9, seed=3, status="degraded"),
    ]
    comparison = compare(folders)
    (mean,) = comparison.means
    assert mean.seeds == (1, 2)
    assert mean.measures["global_accuracy"][0] == pytest.approx(0.3)
    assert comparison.notes == (
        "c repeats b (same settings and seed): left out of the means.",
        "d is degraded: left out of the means.",
    )


def test_runs_that_differ_in_a_setting_are_not_averaged_and_the_setting_is_named(make_run):
    rate = "[training]\nlearning_rate = {}\n"
    folders = [finished(make_run, f"r{seed}", seed=seed, extra=rate.format(0.1 * seed)) for seed in (1, 2)]
    comparison = compare(folders)
    assert comparison.means == ()
    assert comparison.notes == ("training.learning_rate differs: 0.1 in r1; 0.2 in r2",)


def test_where_one_value_is_in_most_runs_the_exceptions_are_named(make_run):
    folders = [finished(make_run, f"r{seed}", seed=seed) for seed in range(4)]
    folders.append(finished(make_run, "odd", extra="[training]\nlearning_rate = 0.5\n"))
    assert compare(folders).notes == ("training.learning_rate differs: 0.5 in odd; 0.01 in the 4 others",)


def test_a_methods_own_settings_are_compared_within_the_method(make_run):
    extra = '[method]\nname = "{}"\n{}\n'
    folders = [
        finished(make_run, "u", extra=extra.format("uniform", "temperature = 4.0")),
        finished(make_run, "c1", extra=extra.format("crad", "min_support = 1")),
        finished(make_run, "c2", extra=extra.format("crad", "")),
    ]
    assert compare(folders).notes == ("method.min_support of crad differs: 1 in c1; not set in c2",)


def test_the_name_of_a_run_is_no_difference(make_run):
    one, two = finished(make_run, "one", seed=1), finished(make_run, "two", seed=2)
    file = two / "topology.toml"
    file.write_text(file.read_text().replace('"digits-ring"', '"another"'))
    comparison = compare([one, two])
    assert comparison.notes == ()
    assert len(comparison.means) == 1


def test_a_run_without_a_result_has_dashes(make_run):
    run = make_run("dead", peers=1)
    run.close(status="failed", startup_s=None)
    comparison = compare([run.path, finished(make_run, "good")])
    assert comparison.rows[0].measures["global_accuracy"] is None
    assert [line.split() for line in show(comparison, 120).splitlines() if line.strip().startswith("dead")] == [
        ["dead", "crad", "1", "failed", "–", "–", "–", "0.00", "0.00", "–", "12.5", "–"]
    ]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_narrow_window_cuts_no_number(make_run, width):
    long = "a-run-with-a-rather-long-name-20260102-030405"
    folders = [
        finished(make_run, f"{long}-{seed}", accuracy=0.1234 + seed / 100, wall_s=12345.6, seed=seed) for seed in (1, 2)
    ]
    shown = show(compare(folders), width)
    lines = [line.split() for line in shown.splitlines()]
    assert [
        f"{long}-1",
        "crad",
        "1",
        "complete",
        "0.1334",
        "0.2334",
        "1",
        "2.00",
        "2.50",
        "10.0",
        "12,346",
        "201",
    ] in lines
    assert [
        "mean",
        "±",
        "s.e.",
        "crad",
        "n",
        "=",
        "2",
        "0.1384",
        "0.2384",
        "2.00",
        "2.50",
        "10.0",
        "12,346",
        "201",
    ] in lines
    assert ["±0.0050", "±0.0050", "±0.00", "±0.00", "±0", "±0", "±0"] in lines


def test_square_brackets_in_a_name_are_no_style(make_run):
    folder = finished(make_run, "[red]run")
    assert "[red]run" in show(compare([folder]), 200)


def test_folders_of_one_name_are_told_apart_by_their_paths(make_run):
    folders = [finished(make_run, f"{parent}/out", seed=seed) for seed, parent in enumerate(("a", "b"))]
    assert [row.run for row in compare(folders).rows] == [str(folder) for folder in folders]


def test_wrong_folders_are_refused(make_run, tmp_path):
    folder = finished(make_run, "one")
    with pytest.raises(RunFolderError, match="the same run folder is given twice"):
        compare([folder, folder / ".." / "one"])
    with pytest.raises(RunFolderError, match="does not exist"):
        compare([folder, tmp_path / "nowhere"])
