"""Methods on a frozen CLIP: what may travel, what a file must say, and the images that the clients get."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from peer.data import sets, shifted
from peer.models import prompted, tiny_clip
from peer.plan import Plan, make_plan
from topology import TopologyError, load

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "fedbst_golden.json").read_text())
DESCRIBED: dict[str, dict[str, Any]] = {
    "swarm": {"peers": 4, "rounds": 10},
    "graph": {"kind": "star"},
    "data": {
        "name": "shifted:digits",
        "partition": "dirichlet-capped",
        "alpha": 0.1,
        "test": "dealt",
        "held_out": 0.0,
        "augment": "none",
    },
    "models": {"pool": [{"name": "tiny-clip", "recipe": "digits"}]},
    "method": {"name": "fedbst"},
}
MakePlan = Callable[..., Plan]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakePlan:
    """Plans around an untrained CLIP of the digits' recipe, which has the trained one's shapes."""
    data = sets.load("digits")
    backbone = prompted.clip.FrozenClip(*tiny_clip.build(tiny_clip.RECIPES["digits"], data))
    monkeypatch.setattr(prompted, "_trained", lambda recipe: backbone)

    def plan(**sections: dict[str, Any]) -> Plan:
        described: dict[str, Any] = {name: DESCRIBED[name] | sections.get(name, {}) for name in DESCRIBED}
        path = tmp_path / "swarm.toml"
        path.write_text(tomli_w.dumps(described | {"peer": [{"id": 0, "role": "coordinator"}]}))
        return make_plan(load(path))

    return plan


def travelling(made: Plan) -> set[str]:
    """The names of everything that any message of a run may carry."""
    edges = [(0, client) for client in made.clients] + [(client, 0) for client in made.clients]
    exchanges = range(1, made.method.exchanges + 1)
    return {
        field.name
        for sender, receiver in edges
        for round in made.rounds
        for exchange in exchanges
        for field in made.message(sender, receiver, round, exchange).fields
    }


@pytest.mark.parametrize(
    ("method", "names"),
    [
        ("fedbst", {"model.visual", "selected", "counts", "quota"}),
        ("fedcopl", {"model.visual", "selected", "counts", "quota"}),
        ("promptfl", {"model.context", "selected"}),
        ("promptprox", {"model.context", "selected"}),
        ("zeroshot", set()),
    ],
)
def test_nothing_travels_but_what_the_method_shares(plan: MakePlan, method: str, names: set[str]) -> None:
    assert travelling(plan(method={"name": method})) == names


def test_a_round_costs_what_the_cost_model_says(plan: MakePlan) -> None:
    made = plan()
    blocks, tokens, width = 2, 5, 48
    prompt, clients = 4 * blocks * tokens * width, len(made.clients)
    train = clients * (prompt + 4 + prompt)
    relabel = clients * 2 * 4 * made.data.classes
    assert [made.payload(round) for round in made.rounds] == [
        train + relabel * (round in (1, 6)) for round in made.rounds
    ]


def test_exchanges_are_counted_in_one_row(plan: MakePlan) -> None:
    made = plan()
    numbers = [made.number(round, exchange) for round in made.rounds for exchange in (1, 2)]
    assert numbers == list(range(1, 21))
    assert [made.place(number) for number in (1, 2, 3, 20)] == [(1, 1), (1, 2), (2, 1), (10, 2)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"models": {"pool": ["mlp"]}}, "learns prompts of a frozen CLIP; mlp is none. Name 'clip' or 'tiny-clip'"),
        ({"models": {"pool": [{"name": "tiny-clip", "recipe": "digit"}]}}, "Did you mean digits?"),
        ({"data": {"name": "shifted:digitz"}}, "there is no such recipe. Did you mean digits?"),
        ({"models": {"pool": [{"name": "tiny-clip"}]}}, "recipe"),
        ({"method": {"alpha": 2}}, "method.alpha: 2 is not allowed"),
        ({"graph": {"kind": "ring"}}, "Set graph.kind = 'star'"),
        ({"method": {"name": "fedcopl", "alpha": 0.5}}, "method.alpha: 0.5 is not allowed"),
    ],
)
def test_what_cannot_run_is_refused(plan: MakePlan, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(TopologyError) as caught:
        plan(**changes)
    assert said in str(caught.value)


def test_a_clip_with_other_words_than_the_classes_is_refused(plan: MakePlan, tmp_path: Path) -> None:
    digits = sets.load("digits")
    path = tmp_path / "other.npz"
    names = np.array([f"thing{label}" for label in range(10)])
    arrays = {"x_train": digits.x_train, "y_train": digits.y_train, "x_test": digits.x_test, "y_test": digits.y_test}
    np.savez(path, class_names=names, **arrays)
    with pytest.raises(TopologyError, match="does not know 'thing0'"):
        plan(data={"name": f"npz:{path}"})


def test_the_clients_get_only_images_that_the_clip_never_saw() -> None:
    recipe, digits = tiny_clip.RECIPES["digits"], sets.load("digits")
    seen, left = tiny_clip.split(recipe, digits)
    given = sets.load("shifted:digits")
    assert (len(given.y_train), len(given.y_test)) == (600, 297)
    turned = shifted.turn(digits.x_train, 20.0)
    of_the_clip = {turned[index].tobytes() for index in seen}
    of_the_rest = {turned[index].tobytes() for index in left}
    assert all(image.tobytes() in of_the_rest for image in given.x_train)
    assert not any(image.tobytes() in of_the_clip - of_the_rest for image in given.x_train)
    assert (given.mean, given.std, given.class_names) == (digits.mean, digits.std, digits.class_names)


def test_turning_goes_round_and_back() -> None:
    image = np.zeros((1, 9, 9, 1), np.uint8)
    image[0, 4, 7] = 200
    quarter = shifted.turn(image, 90.0)
    assert quarter.sum() == 200 and quarter[0, :, 4].sum() == 200
    assert np.array_equal(shifted.turn(quarter, -90.0), image)
    assert np.array_equal(shifted.turn(image, 0.0), image)


def test_test_parts_are_as_skewed_as_the_training_parts(plan: MakePlan) -> None:
    made = plan()
    for client in made.clients:
        train = np.bincount(made.data.y_train[made.shards[client].train], minlength=10)
        test = np.bincount(made.data.y_test[made.shards[client].own_of_common_test], minlength=10)
        assert not test[train == 0].any()
    dealt = np.concatenate([made.shards[client].own_of_common_test for client in made.clients])
    assert len(np.unique(dealt)) == len(dealt)
