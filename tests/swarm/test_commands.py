"""The commands around a run: check, methods, compare, report; and what a person sees on a terminal."""

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from peer.methods.registry import METHODS

SWARM = Path(sys.executable).with_name("swarm")


@pytest.fixture(scope="module")
def folder(reference, tmp_path_factory):
    """A copy of a run folder, to write in."""
    return shutil.copytree(reference.folder, tmp_path_factory.mktemp("copy") / "run")


def test_methods_lists_each_with_a_line(command, tmp_path):
    status, said, attempts = command("methods", cwd=tmp_path)
    assert status == 0
    lines = [line.split(maxsplit=1) for line in said.splitlines()]
    assert [name for name, _ in lines] == list(METHODS)
    assert len({summary for _, summary in lines}) == len(METHODS)
    assert attempts == []


def test_check_prints_the_plan(reference, command, tmp_path):
    status, text, attempts = command("check", reference.file, cwd=tmp_path)
    plan = json.loads(command("check", reference.file, "--json", cwd=tmp_path)[1])
    assert (status, attempts) == (0, [])
    assert f"{plan['payload_bytes_per_round']:,} bytes a round" in text
    assert f"{plan['payload_bytes_total']:,} bytes" in text
    assert f"spectral gap {plan['spectral_gap']:.4f}" in text
    for peer in plan["plan"]:
        assert f"{peer['message_bytes']:,}" in text
    assert list(tmp_path.iterdir()) == []


def test_a_method_is_found_in_the_working_directory(reference, command, tmp_path):
    """The console script does not put it on the path as `python -m` does."""
    code = "from peer.methods.local import Local\n\n\nclass Mine(Local):\n    summary = 'mine'\n"
    (tmp_path / "my_method.py").write_text(code)
    line = ("check", reference.file, "--json", "--set", "method.name=my_method:Mine")
    status, said, _ = command(*line, cwd=tmp_path)
    assert status == 0, said
    assert json.loads(said)["payload_bytes_total"] == 0


def test_check_draws_the_graph(reference, command, tmp_path):
    status, said, _ = command("check", reference.file, "--draw", "graph.png", cwd=tmp_path)
    assert status == 0, said
    assert (tmp_path / "graph.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_is_a_mistake(reference, command, tmp_path):
    status, said, _ = command("check", reference.file, "--draw", "nowhere/graph.png", cwd=tmp_path)
    assert status == 2, said
    assert "nowhere/graph.png" in said
    assert "Traceback" not in said


def test_compare_prints_runs_side_by_side(reference, folder, command, tmp_path):
    status, said, _ = command("compare", reference.folder, folder, cwd=tmp_path)
    assert status == 0, said
    assert "crad" in said
    assert f"{reference.summary['global_accuracy']:.3f}" in said


def test_exact_finds_the_round_the_peers_and_the_tensor_at_which_runs_part(reference, folder, run, command, tmp_path):
    status, said, attempts = command("compare", "--exact", reference.folder, folder, cwd=tmp_path)
    assert (status, attempts) == (0, []), said
    assert "equal to the bit: 32 snapshots, rounds 1–8 of peers 0–3" in said
    other = run("--set", "training.learning_rate=0.0021", "--set", "swarm.rounds=1")
    same = run("--set", "swarm.rounds=1")
    status, said, _ = command("compare", "--exact", same.folder, other.folder, cwd=tmp_path)
    assert status == 1
    first, second, third = said.splitlines()
    assert "training.learning_rate differs: 0.002 in" in first
    assert "part in round 1: peers 0–3 differ, 0 others still alike" in second
    assert re.search(r"Checkpoints of peer 0 after round 1: \S+ is the first tensor that differs, by 0\.0\d+ at", third)


def test_exact_takes_two_runs(reference, folder, command, tmp_path):
    for folders in ([folder], [reference.folder, folder, folder]):
        status, said, _ = command("compare", "--exact", *folders, cwd=tmp_path)
        assert status == 2
        assert f"compares two run folders, {len(folders)} were given" in said


def test_report_is_written_anew(folder, command, tmp_path):
    (folder / "report.html").unlink()
    status, said, _ = command("report", folder, cwd=tmp_path)
    assert status == 0, said
    assert said.strip() == str(folder / "report.html")
    assert "small" in (folder / "report.html").read_text()


def test_folders_that_are_no_run_are_refused(reference, command, tmp_path):
    (tmp_path / "empty").mkdir()
    for place in ("nowhere", "empty", str(reference.file)):
        pair = [reference.folder, place]
        for line in (["report", place], ["compare", place], ["compare", *pair], ["compare", "--exact", *pair]):
            status, said, attempts = command(*line, cwd=tmp_path)
            assert status == 2, said
            assert place in said
            assert "Traceback" not in said
            assert attempts == []


def test_a_run_that_is_still_going_has_no_report_yet(folder, command, tmp_path):
    young = shutil.copytree(folder, tmp_path / "young")
    (young / "summary.json").unlink()
    for verb in ("report", "compare"):
        status, said, _ = command(verb, young, cwd=tmp_path)
        assert status == 2, said
        assert "no summary.json" in said


def test_what_is_no_command_is_refused_with_help(command, tmp_path):
    bare, unknown, helped = (command(*line, cwd=tmp_path) for line in ([], ["rnu"], ["run", "--help"]))
    assert bare[0] == unknown[0] == 2
    assert "Usage" in bare[1]
    assert "rnu" in unknown[1]
    assert helped[0] == 0
    assert "--set" in helped[1]


def test_a_terminal_shows_who_waits_for_whom(reference, tmp_path):
    """Without --out the folder gets its name from the file and the time."""
    controller, terminal = pty.openpty()
    with subprocess.Popen(
        [SWARM, "run", reference.file], stdin=terminal, stdout=terminal, stderr=terminal, cwd=tmp_path,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
    ) as process:  # fmt: skip
        os.close(terminal)
        said = read_all(controller)
        os.close(controller)
        process.kill()  # nothing to end where it has said all it had to
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode())
    assert process.returncode == 0, text
    for column in ("peer", "state", "round", "validation", "global", "received", "waits for"):
        assert column in text
    assert "cnn3" in text
    assert "complete. global accuracy" in text
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"small-\d{8}-\d{6}", folder.name)
    assert (folder / "summary.json").is_file()


def read_all(terminal):
    """What is said on a terminal until its last writer has gone."""
    said = b""
    while select.select([terminal], [], [], 60)[0]:
        try:
            said += os.read(terminal, 65536)
        except OSError:  # the other end is closed
            break
    return said
