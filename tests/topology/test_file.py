import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from topology import Topology, load
from topology.file import MethodSection, ModelSpec, dump

thorough = settings(max_examples=100, deadline=None, derandomize=True, database=None)
LoadText = Callable[..., Topology]
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))

words = st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,20}", fullmatch=True)
counts = st.integers(1, 1000)
seconds = st.floats(1e-3, 1e6)
devices = st.sampled_from(["cpu", "cuda", "cuda:0", "cuda:11"])
option_values = st.booleans() | st.integers(-9, 9) | st.floats(-1e9, 1e9) | st.text(max_size=9) | st.lists(counts)
options = st.dictionaries(words.filter(lambda word: word != "name"), option_values, max_size=3)
named = st.builds(lambda name, options: {"name": name, **options}, words, options)
models = words | named
edges = st.just([{"from": 0, "to": 1, "weight": 0.5}, {"from": 1, "to": 2}])


def section(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keys)


graph_kinds = st.one_of(
    section(kind=st.sampled_from(["complete", "ring", "line", "star", "exponential"])),
    st.fixed_dictionaries({"kind": st.just("tree")}, optional={"branching": counts}),
    st.fixed_dictionaries({"kind": st.just("k-regular")}, optional={"degree": counts}),
    st.fixed_dictionaries({"kind": st.just("small-world")}, optional={"degree": counts, "rewire": st.floats(0, 1)}),
    st.fixed_dictionaries({"kind": st.just("erdos-renyi")}, optional={"probability": st.floats(0.01, 1)}),
    st.fixed_dictionaries({"kind": st.just("edges")}, optional={"directed": st.booleans()}),
    st.fixed_dictionaries({"kind": st.just("file"), "path": words}, optional={"directed": st.booleans()}),
)
files = section(
    swarm=section(
        name=words, peers=st.integers(3, 1000), rounds=counts, seed=st.integers(0, 2**63 - 1),
        participants=st.just("all") | st.integers(1, 3), round_deadline_s=seconds,
    ),
    graph=graph_kinds,
    data=section(
        name=words | st.just("npz:my data.npz"), root=st.text(max_size=9), alpha=seconds, classes_per_peer=counts,
        partition=st.sampled_from(["dirichlet", "pathological", "quantity", "iid"]), min_samples=counts,
        held_out=st.floats(0, 0.99), augment=st.sampled_from(["auto", "none", "flip", "crop-flip"]),
    ),
    models=section(pool=st.lists(models, min_size=1, max_size=3)),
    method=named | options,
    training=section(
        epochs=counts, batch_size=counts, optimizer=st.sampled_from(["sgd", "adam"]), learning_rate=seconds,
        momentum=st.floats(0, 0.99), weight_decay=st.floats(0, 1), test_every=counts,
        schedule=st.sampled_from(["cosine", "constant"]),
    ),
    transport=section(
        kind=st.sampled_from(["tcp", "ipc"]), dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
        piece_bytes=st.integers(4096, 1_048_576), window=counts, concurrent=counts, beat_s=st.floats(0.01, 4.9),
        dead_s=st.floats(5.1, 99), disconnected_s=seconds, retry_s=st.floats(0.01, 5), attempts=counts,
        drain_s=seconds,
    ),
    devices=section(
        assign=st.just("auto") | devices | st.lists(devices, min_size=1, max_size=3),
        threads=st.just("auto") | counts,
    ),
    peer=st.lists(
        st.fixed_dictionaries(
            {"id": st.integers(0, 2)},
            optional={
                "model": models, "device": devices, "threads": counts,
                "host": st.sampled_from(["127.0.0.1", "127.1.2.3", "::1", "localhost"]), "port": st.just(0),
            },
        ),
        max_size=3, unique_by=lambda entry: entry["id"],
    ),
    edge=edges,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("topologies")


@thorough
@given(files)
def test_a_dumped_topology_loads_as_the_same(folder: Path, content: dict[str, Any]) -> None:
    (folder / "one.toml").write_text(tomli_w.dumps(content), "utf-8")
    one = load(folder / "one.toml")
    (folder / "two.toml").write_text(dump(one), "utf-8")
    assert load(folder / "two.toml") == one
    assert dump(load(folder / "two.toml")) == dump(one)


@thorough
@given(files)
def test_a_dump_holds_what_was_written_and_every_default(folder: Path, content: dict[str, Any]) -> None:
    (folder / "one.toml").write_text(tomli_w.dumps(content), "utf-8")
    written = tomllib.loads(dump(load(folder / "one.toml")))
    for name, field in Topology.model_fields.items():
        if name in ("peer", "edge", "fault"):
            assert len(written[name]) == len(content.get(name, []))
            continue
        default = field.get_default(call_default_factory=True)
        keys = {"name"} if name == "method" else set() if name == "graph" else set(type(default).model_fields)
        assert keys | set(content.get(name, {})) <= set(written[name])
        changed = {"path", "pool"}  # the path becomes absolute, {name = "cnn6"} becomes "cnn6"
        same = {key: value for key, value in content.get(name, {}).items() if key not in changed}
        assert same.items() <= written[name].items()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_every_example_loads(example: Path, tmp_path: Path) -> None:
    topology = load(example)
    (tmp_path / "copy.toml").write_text(dump(topology), "utf-8")
    assert load(tmp_path / "copy.toml") == topology


def test_an_empty_file_is_a_swarm_of_defaults(load_text: LoadText) -> None:
    topology = load_text("")
    assert (topology.swarm.peers, topology.swarm.rounds, topology.swarm.seed) == (10, 300, 1024)
    assert topology.graph.kind == "complete"
    assert [topology.model_of(i).name for i in range(4)] == ["resnet18", "resnet18_half", "cnn6", "resnet18"]
    assert topology.method == MethodSection(name="crad")
    assert not topology.directed


def test_a_topology_cannot_be_changed(load_text: LoadText) -> None:
    topology = load_text("")
    with pytest.raises(ValidationError, match="frozen"):
        topology.swarm.peers = 3  # type: ignore[misc]


def test_what_is_special_about_a_peer(load_text: LoadText) -> None:
    topology = load_text(
        """
        [models]
        pool = ["cnn6", { name = "mlp", hidden = [256, 128] }]
        [[peer]]
        id = 2
        model = { name = "resnet8", width = 8 }
        device = "cpu"
        [[peer]]
        id = 3
        threads = 2
        """
    )
    assert topology.model_of(0) == ModelSpec(name="cnn6")
    assert topology.model_of(1) == ModelSpec(name="mlp", options={"hidden": [256, 128]})
    assert topology.model_of(2) == ModelSpec(name="resnet8", options={"width": 8})
    assert topology.model_of(3) == topology.model_of(1)
    assert topology.override(0) is None
    two, three = topology.override(2), topology.override(3)
    assert two is not None and three is not None
    assert (two.device, two.threads, two.host, two.port) == ("cpu", None, "127.0.0.1", 0)
    assert (three.device, three.threads, three.model) == (None, 2, None)


def test_equal_models_are_one_key_of_a_dictionary() -> None:
    wide, same = (ModelSpec(name="resnet8", options={"width": 8, "sizes": [1, 2]}) for _ in range(2))
    assert len({wide: 1, same: 2, ModelSpec(name="resnet8"): 3}) == 2


def test_keys_of_the_method_are_its_options(load_text: LoadText) -> None:
    method = load_text("[method]\nname = 'my.module:Method'\ntemperature = 3\nsizes = [1, 2]").method
    assert method == MethodSection(name="my.module:Method", options={"temperature": 3, "sizes": [1, 2]})
    assert load_text("[method]\ntemperature = 3").method.name == "crad"


@pytest.mark.parametrize("peers", [1, 7, 100])
def test_all_peers_take_part_by_default(load_text: LoadText, peers: int) -> None:
    assert load_text(f"[swarm]\npeers = {peers}").participants(1) == tuple(range(peers))


@thorough
@given(seed=st.integers(0, 2**63 - 1), peers=st.integers(1, 60), share=st.floats(0, 1), round=st.integers(1, 999))
def test_participants_are_drawn_in_order_and_for_good(seed: int, peers: int, share: float, round: int) -> None:
    size = max(1, int(share * peers))
    swarm = {"seed": seed, "peers": peers, "participants": size}
    drawn = Topology.model_validate({"swarm": swarm}).participants(round)
    assert len(drawn) == size
    assert list(drawn) == sorted(set(drawn)) and set(drawn) <= set(range(peers))
    # Nothing else in the file has a say.
    assert drawn == Topology.model_validate({"swarm": swarm, "graph": {"kind": "ring"}}).participants(round)


def test_other_rounds_and_seeds_draw_other_participants_and_everyone_has_a_turn(load_text: LoadText) -> None:
    one = load_text("[swarm]\npeers = 50\nparticipants = 10\nseed = 1")
    drawn = [one.participants(round) for round in range(1, 61)]
    assert len(set(drawn)) == 60
    assert set().union(*drawn) == set(range(50))
    assert load_text("[swarm]\npeers = 50\nparticipants = 10\nseed = 2").participants(1) != drawn[0]


def test_overrides_have_the_last_word(load_text: LoadText) -> None:
    topology = load_text(
        "[swarm]\npeers = 4\nrounds = 3\n[method]\nname = 'crad'",
        "swarm.rounds=5", "swarm.rounds = 6", "method.name=uniform", "method.temperature=2.5", 'data.name="cifar10"',
        "models.pool=['cnn3', {name = 'mlp', hidden = [8]}]", "graph.kind=small-world", "data.root=/data=x y",
        "training.learning_rate=1", "devices.assign=cuda:1",
    )  # fmt: skip
    assert (topology.swarm.peers, topology.swarm.rounds) == (4, 6)
    assert topology.method == MethodSection(name="uniform", options={"temperature": 2.5})
    assert (topology.data.name, topology.data.root) == ("cifar10", "/data=x y")
    assert [model.name for model in topology.models.pool] == ["cnn3", "mlp"]
    assert topology.graph.kind == "small-world"
    assert topology.training.learning_rate == 1.0
    assert topology.devices.assign == "cuda:1"


def test_an_edge_list_file_is_sought_beside_the_topology_file(
    load_text: LoadText, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    topology = load_text("[graph]\nkind = 'file'\npath = 'lists/mine.txt'")
    assert topology.graph.kind == "file"
    assert topology.graph.path == str(tmp_path / "lists" / "mine.txt")
