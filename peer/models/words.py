"""Turns class names into the token ids a CLIP text tower reads, with places for a learnt context or in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

PADDING = 0  # behind the end of a text, where the causal mask hides it
TEMPLATE = "a photo of a {}"


class Tokenizer(Protocol):
    """The vocabulary of one text tower."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def placeholder(self) -> int:
        """The id that stands where a learnt context goes."""

    def __call__(self, text: str) -> list[int]:
        """The ids of a text, without start and end."""


@dataclass(frozen=True)
class WordList:
    """A closed vocabulary of whole words in lower case. Ids: padding 0, placeholder 1, words, start, end.

    The end is the highest id, which is how the text tower finds it.
    """

    words: tuple[str, ...]

    @classmethod
    def of(cls, texts: Sequence[str]) -> WordList:
        return cls(tuple(sorted({word for text in texts for word in _split(text)})))

    @property
    def placeholder(self) -> int:
        return 1

    @property
    def start(self) -> int:
        return len(self.words) + 2

    @property
    def end(self) -> int:
        return len(self.words) + 3

    @property
    def size(self) -> int:
        return len(self.words) + 4

    def __call__(self, text: str) -> list[int]:
        """Raises ValueError for a word that this model has never seen."""
        ids = {word: number for number, word in enumerate(self.words, start=2)}
        if unknown := [word for word in _split(text) if word not in ids]:
            raise ValueError(
                f"this CLIP does not know {unknown[0]!r} in {text!r}: its vocabulary is closed and has {len(ids)} "
                f"words: {', '.join(self.words)}"
            )
        return [ids[word] for word in _split(text)]


def context_ids(tokenizer: Tokenizer, names: Sequence[str], tokens: int, limit: int) -> Tensor:
    """Ids (C, L) int64 of `tokens` placeholders and the class's name with a full stop, for a context to replace.

    As long as the longest needs; texts end at their own place. Raises ValueError naming a class that takes more
    than the `limit` of the text tower.
    """
    return _pad(tokenizer, names, [[tokenizer.placeholder] * tokens + tokenizer(f"{spell(n)}.") for n in names], limit)


def sentence_ids(tokenizer: Tokenizer, names: Sequence[str], limit: int, template: str = TEMPLATE) -> Tensor:
    """Ids (C, L) int64 of each class's name in a sentence, `{}` in `template` standing for it; as `context_ids`."""
    return _pad(tokenizer, names, [tokenizer(template.format(spell(name))) for name in names], limit)


def spell(name: str) -> str:
    """A class name in words: underscores are spaces."""
    return name.replace("_", " ")


def _pad(tokenizer: Tokenizer, names: Sequence[str], texts: Sequence[list[int]], limit: int) -> Tensor:
    whole = [[tokenizer.start, *text, tokenizer.end] for text in texts]
    for name, ids in zip(names, whole, strict=True):
        if len(ids) > limit:
            raise ValueError(
                f"class {name!r} takes {len(ids)} tokens with its context, start and end; the text tower reads "
                f"{limit}. Shorten the name or the context"
            )
    longest = max(map(len, whole))
    return torch.tensor([ids + [PADDING] * (longest - len(ids)) for ids in whole])


def _split(text: str) -> list[str]:
    return text.lower().replace(".", " . ").replace("/", " ").replace("-", " ").split()
