"""The tiny CLIP: its recipe and cache, which images it learns from, that it learns, and always the same."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open

from peer.data import sets
from peer.data.sets import DataSet
from peer.models import clip, tiny_clip, words
from peer.models.tiny_clip import RECIPES, Recipe
from topology.errors import TopologyError

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "fedbst_golden.json").read_text())
SHORT = dataclasses.replace(RECIPES["digits"], images=96, epochs=1, layers=1, text_layers=1, least=0.5)


@pytest.fixture(scope="module")
def digits() -> DataSet:
    return sets.load("digits")


def blank(name: str, side: int, count: int) -> DataSet:
    """A data set of black images, with the shapes and class names of a real one."""
    images = np.zeros((count, side, side, 1), np.uint8)
    labels = np.arange(count) % 10
    return DataSet(name, images, labels, images[:1], labels[:1], sets.FASHION_CLASSES, 255.0, (0.5,), (0.5,))


def bytes_of(backbone: clip.FrozenClip) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in backbone.model.state_dict().items()}


# Recipes


def test_every_ingredient_gives_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = RECIPES["digits"]
    assert dataclasses.replace(recipe).digest == recipe.digest
    digests = {recipe.digest}
    for field in dataclasses.fields(Recipe):
        value = getattr(recipe, field.name)
        other = value + "x" if isinstance(value, str) else value * 2
        digests.add(dataclasses.replace(recipe, **{field.name: other}).digest)
    monkeypatch.setattr(tiny_clip, "VERSION", tiny_clip.VERSION + 1)
    digests.add(recipe.digest)
    monkeypatch.setattr(tiny_clip, "CAPTIONS", tiny_clip.CAPTIONS[1:])
    digests.add(recipe.digest)
    assert len(digests) == 1 + len(dataclasses.fields(Recipe)) + 2
    assert len({len(digest) for digest in digests}) == 1


def test_recipes_are_as_small_as_they_say(digits: DataSet) -> None:
    for name, data in (("digits", digits), ("fashion-mnist", blank("fashion-mnist", 28, 10))):
        model, vocabulary = tiny_clip.build(RECIPES[name], data)
        assert RECIPES[name].data == name
        parameters = sum(parameter.numel() for parameter in model.parameters())
        assert parameters == pytest.approx({"digits": 78_833, "fashion-mnist": 384_161}[name], rel=0.02)
        backbone = clip.FrozenClip(model, vocabulary)
        assert backbone.scale == pytest.approx(10.0)
    recorded = GOLDEN["bytes"]["tiny_L4_w96"]
    assert clip.visual_prompt(backbone, 5, 0).nbytes == recorded["fedbst"]["up_per_round"]
    assert clip.text_context(backbone, 4, 0).nbytes == recorded["promptfl"]["up_per_round"]


def test_classes_are_told_apart_by_the_vocabulary() -> None:
    _, vocabulary = tiny_clip.build(RECIPES["fashion-mnist"], blank("fashion-mnist", 28, 10))
    said = words.sentence_ids(vocabulary, sets.FASHION_CLASSES, tiny_clip.TEXT_POSITIONS)
    assert len({tuple(ids) for ids in said.tolist()}) == 10
    assert (said == vocabulary.end).sum(1).tolist() == [1] * 10
    assert words.context_ids(vocabulary, sets.FASHION_CLASSES, 16, tiny_clip.TEXT_POSITIONS).shape[1] <= 24


# Which images it learns from


def test_no_image_has_two_roles(digits: DataSet) -> None:
    own, peers = tiny_clip.split(RECIPES["digits"], digits)
    assert (len(own), len(peers)) == (700, 800)
    assert sorted([*own, *peers]) == list(range(1500))
    again, _ = tiny_clip.split(dataclasses.replace(RECIPES["digits"], epochs=1, rate=1.0), digits)
    assert np.array_equal(own, again)
    other, _ = tiny_clip.split(dataclasses.replace(RECIPES["digits"], seed=2), digits)
    assert not np.array_equal(own, other)


def test_images_of_the_peers_mean_nothing_to_it(digits: DataSet) -> None:
    own, peers = tiny_clip.split(SHORT, digits)
    expected = bytes_of(tiny_clip.train(SHORT, digits))
    for touched, same in ((peers, True), (own, False)):
        images, labels = digits.x_train.copy(), digits.y_train.copy()
        images[touched], labels[touched] = 16 - images[touched], 9 - labels[touched]
        other = dataclasses.replace(digits, x_train=images, y_train=labels, x_test=images, y_test=labels)
        assert (bytes_of(tiny_clip.train(SHORT, other)) == expected) == same


def test_classes_are_thinned_out_geometrically() -> None:
    recipe, labels = RECIPES["fashion-mnist"], np.arange(20_000) % 10
    kept = tiny_clip.thin(recipe, labels, 10)
    assert len(set(kept)) == len(kept)
    counts = np.sort(np.bincount(labels[kept]))[::-1]
    assert counts.tolist() == np.ceil(2000 * 0.1 ** (np.arange(10) / 9)).tolist()
    assert not np.array_equal(np.argsort(np.bincount(labels[kept]))[::-1], np.arange(10))  # not in the classes' order
    everything = tiny_clip.thin(dataclasses.replace(recipe, least=1.0), labels, 10)
    assert np.array_equal(everything, np.arange(20_000))


def test_data_that_do_not_fit_the_recipe(digits: DataSet) -> None:
    with pytest.raises(TopologyError, match="takes 1500 training images of 'digits'; 'digits' has 1500"):
        tiny_clip.split(dataclasses.replace(RECIPES["digits"], images=1500), digits)
    with pytest.raises(TopologyError, match="of 'fashion-mnist'; 'digits' has"):
        tiny_clip.split(dataclasses.replace(RECIPES["fashion-mnist"], images=10), digits)
    with pytest.raises(TopologyError, match=r"images of 8x8; .* tokens of 3x3"):
        tiny_clip.build(dataclasses.replace(RECIPES["digits"], patch=3), digits)


# Learning


def test_loss_by_hand() -> None:
    logits = torch.tensor([[2.0, 0.0, 1.0], [0.5, 1.0, 0.0], [1.0, 0.0, 0.0]], requires_grad=True)
    labels = torch.tensor([0, 1, 0])  # the third class is absent
    images = -logits.log_softmax(1)[range(3), labels].mean()
    columns = -logits.log_softmax(0)
    captions = ((columns[0, 0] + columns[2, 0]) / 2 + columns[1, 1]) / 2
    torch.testing.assert_close(tiny_clip.matching_loss(logits, labels), (images + captions) / 2)
    square, one_each = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)), torch.arange(4)
    clips_own = (F.cross_entropy(square, one_each) + F.cross_entropy(square.T, one_each)) / 2
    torch.testing.assert_close(tiny_clip.matching_loss(square, one_each), clips_own)


def test_short_training_beats_chance(digits: DataSet) -> None:
    recipe = dataclasses.replace(RECIPES["digits"], epochs=12)
    before = tiny_clip.zero_shot_accuracy(clip.FrozenClip(*tiny_clip.build(recipe, digits)), digits)
    losses: list[float] = []
    backbone = tiny_clip.train(recipe, digits, lambda epoch, loss: losses.append(loss))
    after = tiny_clip.zero_shot_accuracy(backbone, digits)
    assert before < 0.25  # chance is 0.1
    assert after > 0.35
    assert len(losses) == 12
    assert losses[-1] < losses[0]
    assert not any(parameter.requires_grad for parameter in backbone.model.parameters())


def test_same_recipe_same_bytes_and_nothing_else_is_touched(digits: DataSet) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        torch.manual_seed(1)
        random = torch.get_rng_state()
        first = tiny_clip.train(SHORT, digits)
        assert torch.get_rng_state().equal(random)
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
        torch.manual_seed(2)
        assert bytes_of(tiny_clip.train(SHORT, digits)) == bytes_of(first)
        assert bytes_of(tiny_clip.train(dataclasses.replace(SHORT, seed=2), digits)) != bytes_of(first)
    finally:
        torch.set_num_threads(threads)


def test_training_that_diverges_says_so(digits: DataSet) -> None:
    with pytest.raises(FloatingPointError, match=r"epoch \d+: the loss is nan; lower the recipe's rate"):
        tiny_clip.train(dataclasses.replace(SHORT, rate=1e30, epochs=3), digits)


# The cache


def test_trained_once_and_then_read(digits: DataSet, tmp_path: Path) -> None:
    folder, epochs = tmp_path / "not" / "there", []
    first = tiny_clip.obtain(SHORT, digits, folder, lambda epoch, loss: epochs.append(epoch))
    assert epochs == [1]
    kept = tiny_clip.file(SHORT, folder)
    assert list(folder.iterdir()) == [kept]
    assert SHORT.digest in kept.name
    with safe_open(kept, "pt") as stored:
        assert Recipe(**json.loads(stored.metadata()["recipe"])) == SHORT
    second = tiny_clip.obtain(SHORT, digits, folder, lambda epoch, loss: epochs.append(epoch))
    assert epochs == [1]
    assert bytes_of(second) == bytes_of(first)
    images = torch.randn(2, 1, 8, 8)
    assert second.encode_images(images).equal(first.encode_images(images))
    other = dataclasses.replace(SHORT, seed=2)
    tiny_clip.obtain(other, digits, folder, lambda epoch, loss: epochs.append(epoch))
    assert epochs == [1, 1]
    assert sorted(folder.iterdir()) == sorted([kept, tiny_clip.file(other, folder)])


def test_damaged_file_is_refused(digits: DataSet, tmp_path: Path) -> None:
    tiny_clip.obtain(SHORT, digits, tmp_path)
    kept = tiny_clip.file(SHORT, tmp_path)
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-100])
    with pytest.raises(TopologyError, match="is damaged or of another model; delete it, and train again"):
        tiny_clip.obtain(SHORT, digits, tmp_path)
    kept.write_bytes(whole)
    for names in (("zero", *"123456789"), ("nought nil", *"123456789")):  # the first has a vocabulary of the same size
        other = dataclasses.replace(digits, class_names=names)
        with pytest.raises(TopologyError, match=r"is damaged or of another model.* vocabulary"):
            tiny_clip.obtain(SHORT, other, tmp_path)
    with pytest.raises(TopologyError, match="is damaged or of another model"):
        tiny_clip.file(SHORT, tmp_path).rename(tiny_clip.file(RECIPES["digits"], tmp_path))
        tiny_clip.obtain(RECIPES["digits"], digits, tmp_path)


# With prompts


def test_it_takes_prompts_as_any_clip_does(digits: DataSet) -> None:
    backbone = tiny_clip.train(dataclasses.replace(SHORT, layers=3), digits)
    visual = clip.visual_prompt(backbone, 5, 0).requires_grad_()
    context = clip.context_of_words(backbone, "a photo of a").requires_grad_()
    said = words.context_ids(backbone.tokenizer, digits.class_names, 4, backbone.context_length)
    images = digits.normalize(digits.x_test[:6])
    found = clip.logits(backbone.encode_images(images, visual), backbone.encode_texts(said, context), backbone.scale)
    assert found.shape == (6, 10)
    gradients = torch.autograd.grad(
        F.cross_entropy(found, torch.from_numpy(digits.y_test[:6].copy())), [visual, context]
    )
    assert all(gradient.abs().flatten(1).sum(1).all() for gradient in gradients)
