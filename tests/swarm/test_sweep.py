"""A sweep of real runs: what it leaves, that it goes on where it stopped, and that nothing outlives it."""

import csv
import json
import os
import shutil
import signal
from statistics import fmean

import pytest

TINY = {"swarm": {"rounds": 2, "peers": 2}}
GRID = ("--vary", "method.name=local,uniform", "--vary", "swarm.seed=1,2")
CELLS = {f"method.name={method},swarm.seed={seed}" for method in ("local", "uniform") for seed in (1, 2)}


@pytest.fixture(scope="module")
def swept(run):
    return run(*GRID, "--at-once", "2", verb="sweep", **TINY)


@pytest.fixture
def copy(swept, tmp_path):
    """A copy of a whole sweep, to go on from."""
    return shutil.copytree(swept.folder, tmp_path / "sweep")


def summary(cell):
    return json.loads((cell / "summary.json").read_text())


def test_every_combination_is_run_and_ends_in_a_table_and_a_figure(swept):
    assert swept.status == 0, swept.output
    assert {cell.name for cell in swept.folder.iterdir() if cell.is_dir()} == CELLS
    assert "4 cells in" in swept.output and "0 finished before, 4 to run" in swept.output
    for cell in CELLS:
        assert f"{cell}: complete. global accuracy" in swept.output
    with (swept.folder / "sweep.csv").open(newline="") as file:
        lines = {line["method.name"]: line for line in csv.DictReader(file)}
    for method in ("local", "uniform"):
        runs = [summary(swept.folder / f"method.name={method},swarm.seed={seed}") for seed in (1, 2)]
        assert [(one["method"], one["seed"]) for one in runs] == [(method, 1), (method, 2)]
        for name in ("global_accuracy", "local_accuracy", "wall_s"):
            assert float(lines[method][name]) == pytest.approx(fmean(one[name] for one in runs))
        assert f"{fmean(one['global_accuracy'] for one in runs):.4f} ± " in swept.output
    assert (swept.folder / "sweep.png").is_file()


def test_it_goes_on_where_it_stopped_and_runs_no_finished_cell_twice(swept, copy, run):
    broken, gone, *_ = sorted(CELLS)
    (copy / broken / "summary.json").unlink()
    shutil.rmtree(copy / gone)
    before = {name: summary(copy / name)["started_at"] for name in CELLS - {broken, gone}}
    ended = run(*GRID, verb="sweep", out=copy, **TINY)
    assert ended.status == 0, ended.output
    assert "2 finished before, 2 to run" in ended.output
    assert {name: summary(copy / name)["started_at"] for name in before} == before
    assert (copy / f"{broken}.aside-1" / "topology.toml").is_file()
    for name in (broken, gone):
        again, first = summary(copy / name), summary(swept.folder / name)
        assert again["global_accuracy_by_round"] == first["global_accuracy_by_round"]


def test_a_folder_of_other_settings_is_refused_by_name(copy, run):
    ended = run(*GRID, verb="sweep", out=copy, training={"learning_rate": 0.5}, **TINY)
    assert ended.status == 2, ended.output
    assert "method.name=local,swarm.seed=1 holds a run of other settings" in ended.output
    assert "training.learning_rate: 0.002 there, 0.5 here" in ended.output


def test_all_cells_are_checked_before_the_first_is_run(run):
    """What only the plan can tell, of the last cell."""
    ended = run("--vary", "method.name=local,nonsense", verb="sweep", **TINY)
    assert ended.status == 2, ended.output
    assert "cell method.name=nonsense:" in ended.output
    assert "Traceback" not in ended.output
    assert not ended.folder.exists()


def test_degraded_and_failed_cells_are_told_and_the_others_are_run(run):
    grid = "method.name=breaking:AllRaise,breaking:OneRaises,local"
    ended = run("--vary", grid, verb="sweep", **TINY)
    assert ended.status == 1, ended.output
    cells = sorted(cell for cell in ended.folder.iterdir() if cell.is_dir())
    assert [summary(cell)["status"] for cell in cells] == ["failed", "degraded", "complete"]
    assert f"{cells[0].name} is failed: left out of the means." in ended.output
    assert f"{cells[1].name} is degraded: left out of the means." in ended.output
    assert "peer 0 raises in round 1" in ended.output
    again = run("--vary", grid.replace("breaking:AllRaise,", ""), verb="sweep", out=ended.folder, **TINY)
    assert again.status == 3, again.output
    assert "2 finished before, 0 to run" in again.output


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_whatever_ends_it_ends_its_cells(start, run, how):
    line = ("--vary", "swarm.seed=1,2,3", "--at-once", "2")
    long = {"swarm": {"rounds": 100_000, "peers": 2}}
    sweep = start(*line, verb="sweep", **long)
    cells = [sweep.folder / f"swarm.seed={seed}" for seed in (1, 2)]
    for cell in cells:
        sweep.wait_for(lambda cell=cell: b'"round"' in read(cell / "peers" / "1" / "events.jsonl"))
    if how == signal.SIGINT:
        second = run(*line, verb="sweep", out=sweep.folder, **long)
        assert second.status == 2
        assert "another sweep is going on in" in second.output
        os.killpg(sweep.process.pid, how)  # as a terminal does it
    else:
        sweep.process.kill()
        sweep.vanish()
        assert not any((cell / "summary.json").exists() for cell in cells)
        shutil.rmtree(sweep.temporary)  # where a run that is killed leaves its sockets
        sweep.temporary.mkdir()
        assert sweep.end().status == -how
        return
    ended = sweep.end()
    assert ended.status == 1, ended.output
    assert "the same command goes on from here" in ended.output
    assert [summary(cell)["status"] for cell in cells] == ["failed", "failed"]
    assert not (sweep.folder / "swarm.seed=3").exists()


def read(path):
    return path.read_bytes() if path.exists() else b""
