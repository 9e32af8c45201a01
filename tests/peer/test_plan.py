"""The plan knows what a round will cost before it runs, and refuses what cannot run with one useful sentence."""

import json
from pathlib import Path

import numpy as np
import pytest

from peer import devices
from peer.plan import Plan, make_plan
from topology import TopologyError, load

GOLDEN = Path(__file__).parent.parent / "golden" / "crad_golden.json"


def plan_of(folder: Path, text: str) -> Plan:
    file = folder / "swarm.toml"
    file.write_text(text)
    return make_plan(load(file))


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(TopologyError) as caught:
        plan_of(folder, text)
    return str(caught.value)


@pytest.fixture
def color_images(tmp_path: Path) -> str:
    """200 images of 32x32x3 in 10 classes."""
    rng = np.random.default_rng(0)
    path = tmp_path / "images.npz"
    labels = np.arange(200) % 10
    images = rng.integers(0, 256, (200, 32, 32, 3), dtype=np.uint8)
    np.savez(path, x_train=images, y_train=labels, x_test=images[:20], y_test=labels[:20])
    return f"npz:{path}"


def test_traffic_of_the_papers_pool(tmp_path: Path, color_images: str) -> None:
    """CRAD paper's default federation: ten clients, three architectures, full mesh."""
    cases = json.loads(GOLDEN.read_text())["cases"]
    expected = next(case for case in cases if case["name"] == "sizes_and_traffic")["expected"]["C=10"]
    plan = plan_of(tmp_path, f'[data]\nname = "{color_images}"\npartition = "iid"\n')
    snapshot = [plan.facts[i].message.bytes for i in range(3)]
    assert snapshot == [expected["snapshot_bytes"][name] + expected["stats_bytes"] for name in
                        ("resnet18", "resnet18_half", "cnn6")]  # fmt: skip
    for i in range(3):
        down = sum(plan.facts[j].message.bytes for j in plan.senders(i, 1))
        assert down == expected["crad_down"][i]
        assert plan.facts[i].message.bytes * len(plan.receivers(i, 1)) == expected["crad_up_unicast"][i]
        assert plan.facts[i].message.bytes == expected["crad_up_broadcast"][i]
    statistics = 80 * 90
    assert plan.payload(1) - statistics == expected["traffic_all_clients_crad_weights"]


def test_the_common_task_costs_what_it_must() -> None:
    example = Path(__file__).parent.parent.parent / "examples" / "dpsgd-digits.toml"
    plan = make_plan(load(example))
    assert plan.facts[0].parameters == 50_826
    assert sum(plan.payload(round) for round in plan.rounds) == 40_660_800


MLP = '[models]\npool = [{ name = "mlp", hidden = [8] }]\n'


def test_only_participants_exchange(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, f"[swarm]\npeers = 8\nparticipants = 3\nrounds = 20\n{MLP}")
    seen = set()
    for round in plan.rounds:
        chosen = plan.topology.participants(round)
        seen |= set(chosen)
        for peer in plan.peers:
            partners = tuple(j for j in chosen if j != peer) if peer in chosen else ()
            assert plan.senders(peer, round) == plan.receivers(peer, round) == partners
        assert plan.payload(round) == 3 * 2 * plan.facts[0].message.bytes
    assert len(seen) > 3


def test_threads_are_divided_and_may_be_overridden(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, f"[swarm]\npeers = 3\n{MLP}[devices]\nthreads = 2\n[[peer]]\nid = 1\nthreads = 5\n")
    assert plan.threads == (2, 5, 2)
    plan = plan_of(tmp_path, f"[swarm]\npeers = 64\n{MLP}[data]\npartition = 'iid'\n")
    assert set(plan.threads) == {max(1, len(__import__("os").sched_getaffinity(0)) // 64)}
    assert plan.topology.devices.threads == plan.threads[0]  # written out, so that a rerun elsewhere has as many


def test_devices_are_dealt_round_robin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "visible_devices", lambda: 2)
    plan = plan_of(tmp_path, f'[swarm]\npeers = 5\n{MLP}[[peer]]\nid = 3\ndevice = "cpu"\n')
    assert plan.devices == ("cuda:0", "cuda:1", "cuda:0", "cpu", "cuda:0")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('[models]\npool = ["resnet8x"]', ["models", "resnet8x", "resnet8", "cnn3"]),
        ('[data]\nname = "digit"', ["data.name", "digit", "digits", "cifar10"]),
        ('[method]\nname = "cradd"', ["method.name", "cradd", "crad", "dpsgd"]),
        (f"{MLP}[method]\nlambda = 0.7", ["method.lambda", "distillation_weight"]),
        (f"{MLP}[method]\ntemperature = 0.0", ["method.temperature", "0.0", "greater than 0"]),
        (f'{MLP}[method]\nweighting = "best"', ["method.weighting", "best", "precision"]),
        (f"{MLP}[data]\nheld_out = 0.0", ["data.held_out", "above 0"]),
        ('[method]\nname = "dpsgd"', ["models.pool", "same model", "cnn6"]),
        (f'{MLP}[devices]\nassign = "cuda:7"', ["devices.assign", "cuda:7", "cpu"]),
        (f'{MLP}[[peer]]\nid = 2\ndevice = "cuda:7"', ["[[peer]] 2", "cuda:7", "cpu"]),
        (f"[swarm]\npeers = 900\n{MLP}[data]\npartition = 'iid'\nmin_samples = 2", ["min_samples", "900"]),
    ],
)
def test_mistakes_name_the_key_and_what_is_allowed(tmp_path: Path, text: str, parts: list[str]) -> None:
    message = refusal(tmp_path, text)
    for part in parts:
        assert part in message, message
    assert "Traceback" not in message
