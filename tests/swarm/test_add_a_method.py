"""The method that docs/add-a-method.md shows is whole, is short, and runs as the page says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_method_of_the_page_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "add-a-method.md").read_text()
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    assert len(code.splitlines()) < 40
    (tmp_path / "median_gossip.py").write_text(code)
    options = ["--set", "method.name=median_gossip:MedianGossip", "--set", "method.step=0.3"]
    assert all(option in page for option in options)
    example = ROOT / "examples" / "dpsgd-digits.toml"
    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-m", "launch", "run", example, *options, "--set", "swarm.rounds=3", "--out", run],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((run / "summary.json").read_text())
    assert summary["method"] == "median_gossip:MedianGossip"
    assert summary["bytes"]["payload"] == 3 * 20 * 203_304
    journal = (run / "peers" / "4" / "events.jsonl").read_text().splitlines()
    rounds = [event for event in map(json.loads, journal) if event["event"] == "round"]
    assert [event["method"]["neighbors"] for event in rounds] == [2.0, 2.0, 2.0]
    assert "step = 0.3" in (run / "topology.toml").read_text()
