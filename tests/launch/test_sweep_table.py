"""Grids, and what they came to: cells, their names, means over seeds, the table, the CSV and the figure."""

import csv
import math

import pytest
from rich.console import Console

from launch.grid import Cell, lay_out, read_variations, set_aside
from launch.spread import mean_and_error
from launch.sweep import RUN_MB, fits
from launch.sweep_table import tabulate
from topology import TopologyError


def test_values_are_divided_by_commas_that_are_in_no_bracket_and_no_quotation():
    grid = read_variations(
        ["method.name=crad, uniform", 'models.pool=["mlp", "cnn6"],[{name = "mlp", hidden = [1,2]}]', 'data.root="a,b"']
    )
    assert grid == {
        "method.name": ["crad", "uniform"],
        "models.pool": ['["mlp", "cnn6"]', '[{name = "mlp", hidden = [1,2]}]'],
        "data.root": ['"a,b"'],
    }


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "name at least one key"),
        (["seed=1"], r"'seed=1': is section\.key=value"),
        (["swarm.seed"], r"'swarm\.seed': is section"),
        (["swarm.seed=1,,2"], "is section"),
        (["swarm.seed=1,2,1"], "1 is there twice"),
        (["swarm.seed=1", "swarm.seed=2"], r"--vary swarm\.seed: is given twice"),
    ],
)
def test_what_is_no_grid_is_refused(options, told):
    with pytest.raises(TopologyError, match=told):
        read_variations(options)


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "file.toml"
    file.write_text("[swarm]\npeers = 3\n")
    return file


def test_cells_are_named_after_their_values_the_last_key_changing_fastest(file, tmp_path):
    grid = read_variations(["method.name=crad,uniform", "swarm.seed=1,2"])
    cells = lay_out(file, grid, tmp_path / "out")
    assert [cell.folder for cell in cells] == [
        tmp_path / "out" / f"method.name={method},swarm.seed={seed}"
        for method, seed in (("crad", 1), ("crad", 2), ("uniform", 1), ("uniform", 2))
    ]
    assert cells[3].changes == ["method.name=uniform", "swarm.seed=2"]
    assert (cells[3].load().method.name, cells[3].load().swarm.seed) == ("uniform", 2)


def test_names_are_names_of_files_and_differ(file, tmp_path):
    grid = read_variations(["models.pool=['mlp'],['m/l/p'],['m.l.p'],['" + "x" * 300 + "']"])
    names = [cell.name for cell in lay_out(file, grid, tmp_path)]
    assert len(set(names)) == 4
    for name in names:
        assert "/" not in name
        (tmp_path / f"{name}.aside-1").mkdir()


def test_a_wrong_cell_and_a_cell_that_is_another_are_named(file, tmp_path):
    with pytest.raises(TopologyError, match=r"cell swarm\.rounds=0:\n.*swarm\.rounds = 0"):
        lay_out(file, {"swarm.rounds": ["1", "0"]}, tmp_path)
    with pytest.raises(TopologyError, match=r"cell data\.alpha=0\.50: is the same run as data\.alpha=0\.5;"):
        lay_out(file, {"data.alpha": ["0.5", "0.50"]}, tmp_path)


def test_what_is_set_aside_is_kept(file, tmp_path):
    cell = Cell(tmp_path / "cell", file, {})
    for number in (1, 2):
        set_aside(cell)
        cell.folder.mkdir()
        set_aside(cell)
        (cell.folder / "what").write_text(str(number))
    set_aside(cell)
    assert not cell.folder.exists()
    assert [(tmp_path / f"cell.aside-{number}" / "what").read_text() for number in (1, 2)] == ["1", "2"]


def test_runs_at_once_share_what_was_free_before_them():
    assert fits(1e9, [], 0.0)  # alone it was checked already
    assert fits(100.0, [100.0], 200.0 + 2 * RUN_MB)
    assert not fits(100.0, [100.0], 199.0 + 2 * RUN_MB)
    assert not fits(100.0, [100.0, 100.0], 200.0 + 3 * RUN_MB)


def test_mean_and_standard_error():
    # 0.1, 0.2, 0.6: mean 0.3; squared deviations 0.04 + 0.01 + 0.09, over n - 1 = 2, over n = 3.
    assert mean_and_error([0.1, None, 0.2, 0.6]) == pytest.approx((0.3, math.sqrt(0.14 / 2 / 3)))
    assert mean_and_error([0.1]) == (0.1, None)
    assert mean_and_error([None]) is None


@pytest.fixture
def cells(make_run, file):
    """crad on seeds 1 and 2, uniform on seed 1 alone: its seed 2 is degraded, and its seed 3 left nothing."""
    cells = []
    for method, seed, accuracy, status in (
        ("crad", 1, 0.2, "complete"),
        ("crad", 2, 0.4, "complete"),
        ("uniform", 1, 0.5, "complete"),
        ("uniform", 2, 0.9, "degraded"),
    ):
        run = make_run(f"{method}-{seed}", peers=2, rounds=1, seed=seed)
        for peer in range(2):
            run.round(peer, 1, validation=0.5, local=accuracy + 0.1, overall=accuracy)
            run.deliver(peer, 1, 1 - peer, payload=1_000_000)
            run.finish(peer)
        run.close(status=status, wall_s=10.0 * seed)
        cells.append(Cell(run.path, file, {"method.name": method, "swarm.seed": str(seed)}))
    return [*cells, Cell(file.parent / "uniform-3", file, {"method.name": "uniform", "swarm.seed": "3"})]


def test_means_are_over_the_complete_runs_of_each_combination(cells):
    swept = tabulate(cells)
    crad, uniform = swept.lines
    assert (crad.values, crad.runs) == ({"method.name": "crad"}, 2)
    assert crad.measures["global_accuracy"] == pytest.approx((0.3, 0.1))
    assert crad.measures["wall_s"] == pytest.approx((15.0, 5.0))
    assert (uniform.values, uniform.runs) == ({"method.name": "uniform"}, 1)
    assert uniform.measures["local_accuracy"] == (pytest.approx(0.6), None)
    assert swept.statuses == ("complete", "complete", "complete", "degraded", "failed")
    assert swept.notes == (
        "uniform-2 is degraded: left out of the means.",
        "uniform-3 is failed: left out of the means.",
    )


@pytest.mark.parametrize("width", [50, 200])
def test_the_table_is_whole_in_any_window(cells, width):
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(tabulate(cells).table(), crop=False)
    lines = [line.split() for line in capture.get().splitlines()]
    assert ["crad", "2", "0.3000", "±", "0.1000", "0.4000", "±", "0.1000"] in [line[:8] for line in lines]
    assert ["uniform", "1", "0.5000", "0.6000", "2.00", "10.00"] in lines


def test_the_csv_has_what_the_table_has_and_the_figure_is_a_picture(cells, tmp_path):
    tabulate(cells).write(tmp_path)
    with (tmp_path / "sweep.csv").open(newline="") as file:
        crad, uniform = csv.DictReader(file)
    assert (crad["method.name"], crad["runs"], uniform["runs"]) == ("crad", "2", "1")
    assert float(crad["global_accuracy"]) == pytest.approx(0.3)
    assert float(crad["global_accuracy_error"]) == pytest.approx(0.1)
    assert float(uniform["payload_mb"]) == 2.0 and uniform["payload_mb_error"] == ""
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_a_sweep_without_a_result_still_has_a_table_and_a_figure(cells, tmp_path):
    swept = tabulate(cells[-1:])
    assert swept.lines[0].measures == dict.fromkeys(swept.lines[0].measures)
    swept.write(tmp_path)
    assert (tmp_path / "sweep.png").is_file()
