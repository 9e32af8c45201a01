"""Prompts in a frozen CLIP: the hooks against loops written by hand, what learns, and what is refused."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel, SiglipConfig, SiglipModel

from peer.data import sets
from peer.methods import fedbst
from peer.models import build, clip, describe, words
from topology.errors import TopologyError
from topology.file import ModelSpec

ROOT = Path(__file__).parent.parent.parent
GOLDEN = json.loads((ROOT / "tests" / "golden" / "fedbst_golden.json").read_text())
NAMES = ("cat", "polar_bear", "dog")
TOKENIZER = words.WordList.of(["a photo of a polar bear.", "cat dog"])


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}


def small_model(vocabulary: int = TOKENIZER.size, end: int = TOKENIZER.end, seed: int = 0) -> CLIPModel:
    torch.manual_seed(seed)
    text = SMALL | {"vocab_size": vocabulary, "max_position_embeddings": 20, "num_hidden_layers": 2}
    text |= {"bos_token_id": vocabulary - 2, "eos_token_id": end, "pad_token_id": 0}
    vision = SMALL | {"hidden_size": 48, "image_size": 16, "patch_size": 4, "num_hidden_layers": 3}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=24))


@pytest.fixture(scope="module")
def backbone() -> clip.FrozenClip:
    return clip.FrozenClip(small_model(), TOKENIZER)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ids(backbone: clip.Backbone, tokens: int) -> Tensor:
    return words.context_ids(backbone.tokenizer, NAMES, tokens, backbone.context_length)


# The hooks against loops written by hand


def block(layer: Any, seen: Tensor, mask: Tensor | float = 0.0) -> Tensor:
    """One transformer block, pre-norm, from its weights alone."""
    attention, normal = layer.self_attn, layer.layer_norm1(seen)
    heads = attention.num_heads
    q, k, v = (
        linear(normal).unflatten(2, (heads, -1)).transpose(1, 2)
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    weights = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5 + mask).softmax(3)
    seen = seen + attention.out_proj((weights @ v).transpose(1, 2).flatten(2))
    hidden = layer.mlp.fc1(layer.layer_norm2(seen))
    hidden = hidden * torch.sigmoid(1.702 * hidden)
    return seen + layer.mlp.fc2(hidden)  # type: ignore[no-any-return]


def images_by_hand(model: Any, images: Tensor, visual: Tensor) -> Tensor:
    tower = model.vision_model
    patches = tower.embeddings.patch_embedding(images).flatten(2).transpose(1, 2)
    first = tower.embeddings.class_embedding.expand(len(images), 1, -1)
    seen = torch.cat([first, patches], 1) + tower.embeddings.position_embedding.weight
    seen = tower.pre_layrnorm(seen)
    for number, layer in enumerate(tower.encoder.layers):
        if number < len(visual):
            prompted = torch.cat([seen, visual[number].expand(len(images), -1, -1)], 1)
            seen = block(layer, prompted)[:, : seen.shape[1]]
        else:
            seen = block(layer, seen)
    return model.visual_projection(tower.post_layernorm(seen[:, 0]))  # type: ignore[no-any-return]


def texts_by_hand(model: Any, ids: Tensor, context: Tensor, end: int) -> Tensor:
    tower = model.text_model
    seen = tower.embeddings.token_embedding(ids)
    seen[:, 1 : 1 + len(context)] = context
    seen = seen + tower.embeddings.position_embedding.weight[: ids.shape[1]]
    future = torch.full((ids.shape[1], ids.shape[1]), -torch.inf).triu(1)
    for layer in tower.encoder.layers:
        seen = block(layer, seen, future)
    ends = (ids == end).int().argmax(1)
    return model.text_projection(tower.final_layer_norm(seen)[torch.arange(len(ids)), ends])  # type: ignore[no-any-return]


@pytest.mark.parametrize("blocks", [0, 1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 5])
def test_visual_prompt_is_the_loop_written_by_hand(backbone: clip.FrozenClip, blocks: int, tokens: int) -> None:
    images, visual = random(4, 3, 16, 16), random(blocks, tokens, 48, seed=1)
    with torch.no_grad():
        found = backbone.encode_images(images, visual)
        torch.testing.assert_close(found, images_by_hand(backbone.model, images, visual), atol=1e-6, rtol=1e-5)
        plain = backbone.encode_images(images)
        torch.testing.assert_close(plain, images_by_hand(backbone.model, images, visual[:0]), atol=1e-6, rtol=1e-5)
    assert found.shape == (4, 24)
    assert torch.allclose(found, plain, atol=1e-4) == (blocks == 0)


@pytest.mark.parametrize("tokens", [1, 4])
def test_text_context_is_the_loop_written_by_hand(backbone: clip.FrozenClip, tokens: int) -> None:
    context = random(tokens, 32)
    with torch.no_grad():
        found = backbone.encode_texts(ids(backbone, tokens), context)
        by_hand = texts_by_hand(backbone.model, ids(backbone, tokens), context, TOKENIZER.end)
    torch.testing.assert_close(found, by_hand, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(found, backbone.encode_texts(ids(backbone, tokens)), atol=1e-4)


@torch.no_grad()
def test_context_of_placeholders_says_what_the_words_say(backbone: clip.FrozenClip) -> None:
    plain = backbone.encode_texts(ids(backbone, 4))
    placeholders = backbone.embed(torch.full((4,), TOKENIZER.placeholder))
    assert backbone.encode_texts(ids(backbone, 4), placeholders).equal(plain)
    said = words.sentence_ids(TOKENIZER, NAMES, backbone.context_length, "a photo of a {}.")
    begun = clip.context_of_words(backbone, "a photo of a")
    torch.testing.assert_close(backbone.encode_texts(ids(backbone, 4), begun), backbone.encode_texts(said))


@torch.no_grad()
def test_padding_means_nothing(backbone: clip.FrozenClip) -> None:
    short = ids(backbone, 2)
    long = F.pad(short, (0, backbone.context_length - short.shape[1]), value=words.PADDING)
    context = random(2, 32)
    torch.testing.assert_close(
        backbone.encode_texts(short, context), backbone.encode_texts(long, context), atol=2e-6, rtol=1e-5
    )
    for number in range(len(NAMES)):  # one class alone says the same as among others
        one = words.context_ids(TOKENIZER, NAMES[number : number + 1], 2, backbone.context_length)
        torch.testing.assert_close(
            backbone.encode_texts(one, context)[0], backbone.encode_texts(short, context)[number], atol=2e-6, rtol=1e-5
        )


def hooks(model: nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())


def test_nothing_stays_in_the_model(backbone: clip.FrozenClip) -> None:
    images, before = random(2, 3, 16, 16), hooks(backbone.model)
    plain = backbone.encode_images(images)
    backbone.encode_images(images, random(2, 5, 48))
    assert hooks(backbone.model) == before
    assert backbone.encode_images(images).equal(plain)
    with pytest.raises(ValueError, match="doesn't match model"):
        backbone.encode_images(random(2, 3, 20, 20), random(2, 5, 48))
    with pytest.raises(ValueError, match="Sequence length must be less"):
        backbone.encode_texts(torch.full((1, 40), TOKENIZER.placeholder), random(2, 32))
    assert hooks(backbone.model) == before


# What learns


def test_training_reaches_the_prompts_and_nothing_else() -> None:
    backbone = clip.FrozenClip(small_model(seed=1), TOKENIZER)
    before = {name: tensor.clone() for name, tensor in backbone.model.state_dict().items()}
    visual, context = clip.visual_prompt(backbone, 5, 7), clip.text_context(backbone, 4, 7)
    prompts = [visual.requires_grad_(), context.requires_grad_()]
    start = [prompt.detach().clone() for prompt in prompts]
    images, labels = random(8, 3, 16, 16), torch.arange(8) % 3
    losses = []
    for _ in range(8):
        texts = backbone.encode_texts(ids(backbone, 4), context)
        said = clip.logits(backbone.encode_images(images, visual), texts, backbone.scale)
        loss = fedbst.objective(said[:6], labels[:6], said[6:])
        gradients = torch.autograd.grad(loss, prompts)
        assert all(gradient.abs().flatten(1).sum(1).all() for gradient in gradients)  # each block, each token
        with torch.no_grad():
            for prompt, gradient in zip(prompts, gradients, strict=True):
                prompt -= 0.05 * gradient
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert not any(prompt.equal(old) for prompt, old in zip(prompts, start, strict=True))
    after = backbone.model.state_dict()
    assert before.keys() == after.keys()
    assert all(after[name].equal(tensor) for name, tensor in before.items())
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in backbone.model.parameters())


def test_first_prompts_depend_on_the_seed_alone(backbone: clip.FrozenClip) -> None:
    makers: list[Callable[[int], Tensor]] = [
        lambda seed: clip.visual_prompt(backbone, 50, seed),
        lambda seed: clip.text_context(backbone, 50, seed),
    ]
    for make in makers:
        torch.manual_seed(3)
        first = make(1)
        assert first.equal(make(1))
        assert not first.equal(make(2))
        assert first.std().item() == pytest.approx(0.02, rel=0.05)
        assert first.mean().abs() < 0.002


def test_sizes_of_the_recorded_traffic() -> None:
    with torch.device("meta"):
        model = CLIPModel(CLIPConfig())  # ViT-B/32
    assert sum(parameter.numel() for parameter in model.parameters()) == 151_277_313
    base = clip.FrozenClip(model, words.WordList(tuple(map(str, range(49408 - 4)))))
    visual, context = clip.visual_prompt(base, 5, 0), clip.text_context(base, 16, 0)
    assert (visual.shape, context.shape) == ((11, 5, 768), (16, 512))
    recorded = GOLDEN["bytes"]["vit_b32_or_b16_c100"]
    assert visual.nbytes == recorded["fedbst"]["up_per_round"] == recorded["fedcopl"]["down_per_round"]
    assert context.nbytes == recorded["promptfl"]["up_per_round"]


# Features that no prompt changes


class Counting:
    """A backbone that counts the images it has encoded."""

    def __init__(self, backbone: clip.FrozenClip) -> None:
        self.images, self._backbone = 0, backbone

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backbone, name)

    def encode_images(self, images: Tensor, visual: Tensor | None = None) -> Tensor:
        self.images += len(images)
        return self._backbone.encode_images(images, visual)


def test_features_without_a_visual_prompt_are_computed_once(backbone: clip.FrozenClip) -> None:
    images, counting = random(10, 3, 16, 16), Counting(backbone)
    seen = clip.Images(counting, images.__getitem__, len(images), batch_size=4)  # type: ignore[arg-type]
    chosen = torch.tensor([7, 1, 7])
    for _ in range(3):
        torch.testing.assert_close(seen.features(), backbone.encode_images(images))
        assert seen.features(chosen).equal(seen.features()[chosen])
    assert counting.images == 10
    visual = random(2, 5, 48).requires_grad_()
    for _ in range(2):
        found = seen.features(chosen, visual)
        torch.testing.assert_close(found, backbone.encode_images(images[chosen], visual))
    assert counting.images == 10 + 2 * 3
    assert torch.autograd.grad(found.sum(), visual)[0].any()
    assert seen.features(chosen[:0]).shape == seen.features(chosen[:0], visual).shape == (0, 24)
    assert not seen.features().requires_grad


# From class names to ids


def test_ids_by_hand() -> None:
    tokenizer = words.WordList.of(["polar bear.", "Cat"])
    assert tokenizer.words == (".", "bear", "cat", "polar")
    assert (tokenizer.start, tokenizer.end, tokenizer.size) == (6, 7, 8)
    found = words.context_ids(tokenizer, ["polar_bear", "cat"], 2, 10)
    assert found.tolist() == [[6, 1, 1, 5, 3, 2, 7], [6, 1, 1, 4, 2, 7, 0]]
    assert words.sentence_ids(tokenizer, ["bear"], 4, "cat {}").tolist() == [[6, 4, 3, 7]]


def test_class_that_is_too_long_is_named() -> None:
    with pytest.raises(ValueError, match=r"class 'polar_bear' takes 9 tokens.* reads 8"):
        words.context_ids(TOKENIZER, NAMES, 4, 8)
    assert words.context_ids(TOKENIZER, NAMES, 4, 9).shape == (3, 9)


def test_word_that_is_not_known_is_named() -> None:
    with pytest.raises(ValueError, match="does not know 'horse' in 'a horse'"):
        TOKENIZER("a horse")


# Loading, and what is refused


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    letters = [*"abcdefghijklmnopqrstuvwxyz."]
    pairs = [*letters, *(f"{letter}</w>" for letter in letters), "do", "dog</w>", "<|startoftext|>", "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(pairs)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nd o\ndo g</w>\n")
    small_model(len(pairs), len(pairs) - 1).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("end", ["as in the ids", "as in old configurations"])
def test_clip_from_a_folder(folder: Path, weights: str, end: str) -> None:
    if weights == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
        torch.save(small_model(58, 57).state_dict(), folder / weights)
    if end == "as in old configurations":
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["eos_token_id"] = 2
        (folder / "config.json").write_text(json.dumps(config))
    found = clip.load(folder)
    assert (found.depth, found.width, found.text_width, found.context_length) == (3, 48, 32, 20)
    assert found.scale == pytest.approx(np.exp(2.6592))
    assert (found.tokenizer.start, found.tokenizer.end) == (56, 57)
    assert found.tokenizer("dog.") == [55, 53]
    images, chosen = random(2, 3, 16, 16), words.context_ids(found.tokenizer, ["dog", "cat"], 3, 20)
    original = clip.FrozenClip(small_model(58, 57), found.tokenizer)
    assert found.encode_images(images).equal(original.encode_images(images))
    context = random(3, 32)
    assert found.encode_texts(chosen, context).equal(original.encode_texts(chosen, context))


def refused(folder: Path, match: str) -> None:
    with pytest.raises(TopologyError, match=match):
        clip.load(folder)


def test_resnet_is_refused_with_the_reason(tmp_path: Path) -> None:
    refused(tmp_path / "RN50", "ResNet, which has no sequence of tokens.* ViT-B/32")
    vision = {"image_size": 224, "layers": [3, 4, 6, 3], "width": 64}
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": {"vision_cfg": vision}}))
    refused(tmp_path, "ResNet, which has no sequence of tokens")
    with pytest.raises(ValueError, match=r"a Sequential cannot take deep visual prompts.* ViT-B/32"):
        clip.FrozenClip(nn.Sequential(nn.Conv2d(3, 8, 3)), TOKENIZER)


def test_other_models_are_refused(folder: Path) -> None:
    siglip = SiglipModel(SiglipConfig(text_config=SMALL, vision_config=SMALL | {"image_size": 16, "patch_size": 8}))
    with pytest.raises(ValueError, match="a SiglipModel cannot take deep visual prompts"):
        clip.FrozenClip(siglip, TOKENIZER)
    siglip.save_pretrained(folder)
    refused(folder, "model of type 'siglip'; it must be 'clip'")


def test_folder_that_is_not_whole_is_refused(folder: Path, tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "there is no CLIP in .*nowhere.*not downloaded")
    (folder / "vocab.json").unlink()
    refused(folder, "cannot be loaded: .vocab. and .merges. must be both")
    (folder / "merges.txt").unlink()
    refused(folder, "the tokenizer ends a text with .* the text tower looks for 57")


def test_weights_that_are_not_whole_are_refused(folder: Path) -> None:
    weights = small_model(58, 57).state_dict()
    del weights["vision_model.post_layernorm.bias"]
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    refused(folder, "its weights lack vision_model.post_layernorm.bias and 0 more")
    (folder / "model.safetensors").write_bytes(b"nothing")
    refused(folder, "cannot be loaded")


@pytest.mark.parametrize("shape", [(4, 5, 48), (2, 5, 47), (5, 48)])
def test_visual_prompt_of_another_shape(backbone: clip.FrozenClip, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"must be \(blocks, tokens, width\), at most 3 blocks and width 48"):
        backbone.encode_images(random(1, 3, 16, 16), random(*shape))


def test_context_that_does_not_fit_the_ids(backbone: clip.FrozenClip) -> None:
    with pytest.raises(ValueError, match="width 32"):
        backbone.encode_texts(ids(backbone, 4), random(4, 31))
    for tokens in (5, 40):
        with pytest.raises(ValueError, match=f"no {tokens} placeholders"):
            backbone.encode_texts(ids(backbone, 4), random(tokens, 32))


def test_images_are_prepared_as_pillow_does() -> None:
    generator = np.random.default_rng(0)
    smooth = generator.integers(0, 256, (2, 6, 8, 3), dtype=np.uint8).repeat(5, 1).repeat(5, 2)  # 30 x 40
    mean, std = np.array(clip.MEAN), np.array(clip.STD)
    for side in (32, 12):
        found = clip.preprocess(smooth, side)
        assert (found.shape, found.dtype) == ((2, 3, side, side), torch.float32)
        for image, tensor in zip(smooth, found, strict=True):
            wide = int(side / 30 * 40)
            resized = np.asarray(Image.fromarray(image).resize((wide, side), Image.Resampling.BICUBIC))
            left = (wide - side) // 2
            expected = resized[:, left : left + side] / 255
            restored = tensor.numpy().transpose(1, 2, 0) * std + mean
            assert np.abs(restored - expected).max() < 1.5 / 255
    grey = clip.preprocess(smooth[..., :1], 30)
    assert grey.shape == (2, 3, 30, 30)
    expected = (torch.from_numpy(smooth[:, :, 5:35, 0].astype(np.float32)) / 255 - clip.MEAN[1]) / clip.STD[1]
    torch.testing.assert_close(grey[:, 1], expected)


def test_transformers_is_imported_where_a_clip_is_used_only() -> None:
    code = "import sys, peer.models.clip, peer.models.words, peer.methods.fedbst; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 24, 24), (3, 16, 16)])
def test_a_clip_from_a_folder_is_a_model_for_images_of_any_size(
    folder: Path, tmp_path: Path, shape: tuple[int, int, int]
) -> None:
    channels, height, width = shape
    images = np.random.default_rng(0).integers(0, 256, (40, height, width, channels), dtype=np.uint8)
    labels, path = np.arange(40) % 2, tmp_path / "small.npz"
    arrays = {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels}
    np.savez(path, class_names=np.array(["cat", "dog"]), **arrays)
    data = sets.load(f"npz:{path}")
    spec = ModelSpec(name="clip", options={"folder": str(folder), "visual_tokens": 2, "context_tokens": 2})
    described = describe(spec, data.shape, 2, data.class_names)
    model: Any = build(spec, data.shape, 2, 0, 0, data.class_names)
    assert {name: tuple(tensor.shape) for name, tensor in described.named_parameters()} == {
        "visual": tuple(model.visual.shape),
        "context": tuple(model.context.shape),
    }
    fits = shape == (3, 16, 16)
    seen = model.see(data.x_train[:3], data)
    expected = data.normalize(data.x_train[:3]) if fits else clip.preprocess(data.x_train[:3], 16)
    assert torch.equal(seen, expected) and seen.shape == (3, 3, 16, 16)
    assert model(data.normalize(data.x_train[:3])).shape == (3, 2)


def test_a_context_may_begin_with_words(folder: Path) -> None:
    spec = ModelSpec(name="clip", options={"folder": str(folder), "context_words": "dog"})
    model: Any = build(spec, (3, 16, 16), 2, 0, 0, ("cat", "dog"))
    assert torch.equal(model.context, clip.context_of_words(model.backbone, "dog"))


def test_a_name_is_looked_for_on_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(name: str, **_: Any) -> str:
        asked.append(name)
        if name != "somebody/clip":
            raise OSError("no route to the hub")
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    there, absent = (
        ModelSpec(name="clip", options={"folder": f"somebody/{name}", "context_tokens": 2}) for name in ("clip", "else")
    )
    model: Any = build(there, (3, 16, 16), 2, 0, 0, ("cat", "dog"))
    assert model(torch.zeros(1, 3, 16, 16)).shape == (1, 2)
    with pytest.raises(TopologyError, match="no model of that name could be had from the hub: no route"):
        build(absent, (3, 16, 16), 2, 0, 0, ("cat", "dog"))
    assert asked == ["somebody/clip", "somebody/else"]
