"""Networks have their papers' parameter counts, learn at every size, and start from seed and peer alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from peer.models import build, describe, names
from topology.errors import TopologyError
from topology.file import ModelSpec

GOLDEN = Path(__file__).parents[1] / "golden" / "crad_golden.json"
FEDCC_GOLDEN = GOLDEN.with_name("fedcc_golden.json")
DOCUMENTATION = Path(__file__).parents[2] / "docs" / "data-and-models.md"
WHOLE = [name for name in names() if not name.endswith("clip")]  # those are prompts around a backbone
SHAPES = [(1, 8, 8), (3, 28, 28), (3, 64, 64)]


def spec(name: str, **options: Any) -> ModelSpec:
    return ModelSpec(name=name, options=options)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def count_snapshot_bytes(module: nn.Module) -> int:
    return 4 * sum(value.numel() for value in module.state_dict().values() if value.is_floating_point())


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(mine, yours) for mine, yours in pairs)


@pytest.mark.parametrize("classes", [9, 10, 100])
def test_the_pool_has_the_papers_sizes(classes: int) -> None:
    cases = json.loads(GOLDEN.read_text())["cases"]
    sizes = next(case for case in cases if case["name"] == "sizes_and_traffic")["expected"][f"C={classes}"]
    for name, expected in sizes["params"].items():
        described = describe(spec(name), (3, 32, 32), classes)
        assert count(described) == expected
        assert count_snapshot_bytes(described) == sizes["snapshot_bytes"][name]
        assert count(build(spec(name), (3, 32, 32), classes, seed=1, peer=0)) == expected


@pytest.mark.parametrize("side", [32, 64])
def test_cifar_resnets_have_their_papers_sizes(side: int) -> None:
    """With C outputs, and with one more for "unknown"; a snapshot holds batch norm's statistics too."""
    cases = json.loads(FEDCC_GOLDEN.read_text())["cases"]
    rows = next(case for case in cases if case["id"] == "c01_costs")["expected"]["rows"]
    assert [row["C"] for row in rows] == [10, 100, 200]
    for row in rows:
        for name in ("resnet14", "resnet20"):
            described, wider = (describe(spec(name), (3, side, side), row["C"] + extra) for extra in (0, 1))
            assert count(described) == row[f"{name}_params"]
            assert count(wider) == row[f"{name}_params_C_plus_1"]
            assert count_snapshot_bytes(described) == row[f"{name}_bytes_with_bn"]
            assert count_snapshot_bytes(wider) == row[f"{name}_bytes_with_bn"] + 4 * 65  # weights and a bias
        assert 4 * count(described) == row["resnet20_bytes"]


def test_sizes_of_the_small_ones() -> None:
    digits = (1, 8, 8)
    assert count(describe(spec("mlp"), digits, 10)) == 50_826
    assert count(describe(spec("mlp", hidden=[]), digits, 10)) == 650
    assert count(describe(spec("mlp", hidden=[5]), digits, 10)) == 65 * 5 + 60
    assert not any(isinstance(part, nn.BatchNorm2d) for part in describe(spec("mlp"), digits, 10).modules())
    assert count(describe(spec("cnn3", width=2), digits, 10)) == 18 + 4 + 72 + 8 + 288 + 16 + 90
    blocks = (2 * 36 + 2 * 4) + (72 + 144 + 2 * 8) + (288 + 576 + 2 * 16)
    assert count(describe(spec("resnet8", width=2), digits, 10)) == 18 + 4 + blocks + 90
    assert count(describe(spec("resnet8"), digits, 10)) == count(describe(spec("resnet8", width=16), digits, 10))


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_model_learns_at_every_size(name: str, shape: tuple[int, int, int]) -> None:
    module = build(spec(name), shape, 5, seed=1, peer=0)
    assert count(describe(spec(name), shape, 5)) == count(module)
    x = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
    for training in (True, False):
        module.train(training).zero_grad()
        logits = module(x)
        assert logits.shape == (2, 5)
        nn.functional.cross_entropy(logits, torch.tensor([0, 3])).backward()
        gradients = [parameter.grad for parameter in module.parameters()]
        assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
        assert all(gradient is not None and gradient.any() for gradient in (gradients[0], gradients[-1]))


def test_a_resnet_block_adds_its_input() -> None:
    """With all residual branches silenced, ResNet-8 passes the stem's output through its shortcuts."""
    module = build(spec("resnet8", width=4), (1, 8, 8), 3, seed=1, peer=0).eval()
    stem: list[torch.Tensor] = []
    module.get_submodule("bn").register_forward_hook(lambda _, __, output: stem.append(output.relu()))
    for name, part in module.named_modules():
        if name.endswith("bn2") and isinstance(part, nn.BatchNorm2d):
            nn.init.zeros_(part.weight)
    features: list[torch.Tensor] = []
    module.get_submodule("blocks").register_forward_hook(lambda _, __, output: features.append(output))
    module(torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)))
    assert features[0].shape == (2, 16, 2, 2)
    assert torch.equal(features[0][:, 6:10], stem[0][:, :, ::4, ::4])
    assert not features[0][:, :6].any()
    assert not features[0][:, 10:].any()


@pytest.mark.parametrize("name", WHOLE)
def test_weights_come_from_seed_and_peer_alone(name: str) -> None:
    shape, state = (1, 8, 8), torch.get_rng_state()
    module = build(spec(name), shape, 10, seed=1, peer=2)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert same_weights(module, build(spec(name), shape, 10, seed=1, peer=2))
    assert not same_weights(module, build(spec(name), shape, 10, seed=1, peer=3))
    assert not same_weights(module, build(spec(name), shape, 10, seed=2, peer=2))


def test_convolutions_start_kaiming_normal() -> None:
    module = build(spec("resnet20"), (3, 32, 32), 10, seed=1, peer=0)
    weight = module.get_submodule("blocks.8.conv2").get_parameter("weight").detach()
    assert float(weight.std()) == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.03)
    assert float(((weight / weight.std()) ** 4).mean()) == pytest.approx(3, rel=0.1)  # normal, not uniform


def test_describing_takes_no_memory() -> None:
    module = describe(spec("resnet18"), (3, 32, 32), 10)
    assert {value.device.type for value in module.state_dict().values()} == {"meta"}
    built = build(spec("resnet18"), (3, 32, 32), 10, seed=1, peer=0)
    layout = [(key, value.shape, value.dtype) for key, value in module.state_dict().items()]
    assert layout == [(key, value.shape, value.dtype) for key, value in built.state_dict().items()]


def test_nothing_imports_the_compiler() -> None:
    program = """
import sys, numpy as np, torch
from peer.data.sets import load
from peer.data.shard import Batches
from peer.models import build, describe, names
from topology.file import ModelSpec
data = load("digits")
for name in [name for name in names() if not name.endswith("clip")]:
    model = ModelSpec(name=name, options={})
    describe(model, data.shape, data.classes)
    module = build(model, data.shape, data.classes, seed=1, peer=0)
    for x, y in Batches(data, np.arange(4), batch_size=4, seed=1, peer=0, round=0, augment="crop-flip"):
        torch.nn.functional.cross_entropy(module(x), y).backward()
print([name for name in ("torch._dynamo", "torchvision", "sympy") if name in sys.modules])
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_every_name_has_a_line() -> None:
    assert set(names()) >= {
        "resnet18",
        "resnet18_half",
        "cnn6",
        "resnet14",
        "resnet20",
        "resnet8",
        "cnn3",
        "mlp",
    }
    assert all(line.endswith(".") and "\n" not in line for line in names().values())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            spec("resnet81"),
            "no such model. Did you mean resnet8.*There are resnet18, .*package.module:callable",
        ),
        (spec("resnet8", width=0), "'resnet8'.* width = 0 must be a positive integer"),
        (spec("resnet8", width=True), "width = True must be a positive integer"),
        (spec("cnn3", width=1.5), r"width = 1\.5 must be a positive integer"),
        (spec("cnn3", depth=3), "unexpected keyword argument 'depth'.*accepts width=16"),
        (spec("resnet18", width=3), "'width'.*accepts no options"),
        (spec("mlp", hidden=64), "hidden = 64 must be a list"),
        (spec("mlp", hidden=[64, -1]), "hidden.* = -1 must be a positive integer"),
        (spec("mlp", hidden=["a"]), "hidden.* = 'a' must be a positive integer"),
    ],
)
def test_mistakes_in_models(wrong: ModelSpec, message: str) -> None:
    with pytest.raises(TopologyError, match=message) as caught:
        describe(wrong, (1, 8, 8), 10)
    assert "models.pool" in str(caught.value)
    with pytest.raises(TopologyError, match=message):
        build(wrong, (1, 8, 8), 10, seed=1, peer=0)


def test_images_too_small() -> None:
    with pytest.raises(TopologyError, match="7x9 images are too small; it takes 8x8 and up"):
        describe(spec("cnn6"), (1, 7, 9), 10)


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Write `ownmodels.py` in the working directory, as a user would."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setitem(sys.modules, "ownmodels", None)
    del sys.modules["ownmodels"]

    def write(text: str) -> None:
        (tmp_path / "ownmodels.py").write_text(f"import torch\nfrom torch import nn\n{text}")

    return write


TINY = """
def tiny(shape, classes, width=4):
    first = nn.Linear(shape[0] * shape[1] * shape[2], width)
    return nn.Sequential(nn.Flatten(), first, nn.Linear(width, classes))
"""


def test_a_model_of_ones_own(write_module: Callable[[str], None]) -> None:
    write_module(TINY)
    state = torch.get_rng_state()
    module = build(spec("ownmodels:tiny", width=3), (1, 8, 8), 10, seed=1, peer=0)
    described = describe(spec("ownmodels:tiny", width=3), (1, 8, 8), 10)
    assert torch.equal(torch.get_rng_state(), state)
    assert count(module) == count(described) == 65 * 3 + 40
    assert {value.device.type for value in described.state_dict().values()} == {"meta"}
    assert same_weights(module, build(spec("ownmodels:tiny", width=3), (1, 8, 8), 10, seed=1, peer=0))
    assert sys.path.count(str(Path.cwd())) == 1


def test_a_class_of_ones_own(write_module: Callable[[str], None]) -> None:
    write_module("""
class Net(nn.Module):
    def __init__(self, shape, classes, *, scale=1.0):
        super().__init__()
        self.linear, self.scale = nn.Linear(shape[1] * shape[2] * shape[0], classes), scale
    def forward(self, x):
        return self.scale * self.linear(x.flatten(1))
""")
    assert count(describe(spec("ownmodels:Net", scale=2.0), (1, 8, 8), 10)) == 650


@pytest.mark.parametrize(
    ("text", "name", "options", "message"),
    [
        (TINY, "nowhere_to_be_found:tiny", {}, "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("import absent_package", "ownmodels:tiny", {}, "No module named 'absent_package'"),
        ("def tiny(:", "ownmodels:tiny", {}, "importing ownmodels raised SyntaxError"),
        (TINY, "ownmodels:huge", {}, "ownmodels .*has no huge"),
        ("tiny = 3", "ownmodels:tiny", {}, "is there, but it cannot be called"),
        (TINY, ":tiny", {}, "is written package.module:name"),
        (TINY, "ownmodels:", {}, "is written package.module:name"),
        (TINY, "ownmodels:tiny", {"depth": 2}, "unexpected keyword argument 'depth'.* accepts width=4"),
        ("def tiny(classes): pass", "ownmodels:tiny", {}, "unexpected keyword argument 'shape'.* no options"),
        ("def tiny(shape, classes): return 3", "ownmodels:tiny", {}, "returned a int, not a torch.nn.Module"),
        (
            "def tiny(shape, classes): return {}[0]",
            "ownmodels:tiny",
            {},
            r"shape=\(1, 8, 8\).* raised KeyError: 0",
        ),
    ],
)
def test_mistakes_in_ones_own(
    write_module: Callable[[str], None], text: str, name: str, options: dict[str, Any], message: str
) -> None:
    write_module(text)
    for attempt in (
        lambda: describe(spec(name, **options), (1, 8, 8), 10),
        lambda: build(spec(name, **options), (1, 8, 8), 10, seed=1, peer=0),
    ):
        with pytest.raises(TopologyError, match=message):
            attempt()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("nn.Flatten()", r"for 2 images it returned \(2, 64\); it must return logits \(2, 10\)"),
        ("nn.LSTM(8, 10)", "its forward pass raised .*"),
        ("nn.Sequential(nn.Flatten(), nn.LSTM(64, 10))", "it returned tuple"),
        ("nn.Linear(65, 10)", r"forward pass raised RuntimeError.*float32 tensor \(batch, 1, 8, 8\)"),
    ],
)
def test_outputs_that_do_not_fit(write_module: Callable[[str], None], body: str, message: str) -> None:
    write_module(f"def tiny(shape, classes): return {body}")
    with pytest.raises(TopologyError, match=message):
        describe(spec("ownmodels:tiny"), (1, 8, 8), 10)


def test_the_documentation_names_every_model_and_its_example_works(
    write_module: Callable[[str], None],
) -> None:
    text = DOCUMENTATION.read_text()
    assert [name for name in names() if f"| `{name}` |" not in text] == []
    write_module(text.split("```python\n# mymodels.py\n")[1].split("```")[0])
    assert count(describe(spec("ownmodels:tiny", width=4), (1, 8, 8), 10)) == 40 + 650
