"""A run's faults in its summary and its report: those that never fired come first."""

import json

from rich.console import Console

from launch.faults import draw_faults
from launch.finish import finish
from launch.report import list_troubles, write_report
from launch.results import Outcome, load

PLAN = """
[[fault]]
id = "wan"
kind = "delay"
delay_ms = 80

[[fault]]
id = "die"
kind = "crash"
peer = 2
at = { round = 2 }

[[fault]]
id = "quiet"
kind = "loss"
probability = 0.0
"""
FIRED = [
    {"t": 1.0, "rule": "wan", "kind": "delay", "exact": True, "round": 1, "peer": 1, "sender": 0, "receiver": 1,
     "message": "piece", "injected_ms": 80.0},
    {"t": 1.5, "rule": "wan", "kind": "delay", "exact": True, "round": 2, "peer": 0, "sender": 1, "receiver": 0,
     "message": "piece", "injected_ms": 80.0},
    {"t": 2.0, "rule": "die", "kind": "crash", "exact": False, "round": 2, "peer": 2},
]  # fmt: skip


def broken(make_run, play_ring):
    run = make_run(peers=3, rounds=2, extra=f'[graph]\nkind = "ring"\n{PLAN}')
    (run.path / "faults.jsonl").write_text("".join(json.dumps(line) + "\n" for line in FIRED))
    play_ring(run)
    return run


def test_the_summary_counts_every_rule_and_the_page_begins_with_the_one_that_never_fired(make_run, play_ring):
    run = broken(make_run, play_ring)
    loaded = load(run.path)
    assert loaded.summary["faults"] == {"wan": 2, "die": 1, "quiet": 0}
    assert list_troubles(loaded) == ["Fault 'quiet' never fired: this run says nothing about it."]
    page = write_report(run.path).read_text("utf-8")
    assert page.index("never fired") < page.index("Faults on purpose") < page.index("Faults on the timeline")
    assert "160 ms" in page
    assert page.count("not exact") == 1
    assert (run.path / "figures" / "faults.png").stat().st_size > 5000


def test_each_fault_is_drawn_when_and_at_whom_it_fired(make_run, play_ring):
    figure = draw_faults(load(broken(make_run, play_ring).path))
    (axes,) = figure.axes
    drawn = {line.get_label(): [*zip(*line.get_data(), strict=True)] for line in axes.lines}
    assert drawn["wan (2)"] == [(1.0, 1), (1.5, 0)]
    assert drawn["die (1)"] == [(2.0, 2)]


def test_a_run_without_a_plan_has_no_such_figure_and_no_such_table(make_run, play_ring):
    run = make_run(peers=3, rounds=1, extra='[graph]\nkind = "ring"\n')
    play_ring(run)
    assert draw_faults(load(run.path)) is None
    assert "Faults on purpose" not in write_report(run.path).read_text("utf-8")


def test_the_last_lines_of_a_run_name_the_rules_that_never_fired(make_run, play_ring, capsys):
    run = broken(make_run, play_ring)
    finish(
        run.path, Outcome(status="complete", started_at="2026-01-02T03:04:05+00:00", wall_s=1, startup_s=1), Console()
    )
    assert capsys.readouterr().out.splitlines()[0] == "! fault 'quiet' never fired"
