"""What a model sees in images: its features of a few test images of each class, kept for a figure of the report."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

IMAGES = 2000  # spread evenly over the classes


def balanced(labels: Tensor, classes: int, images: int = IMAGES) -> Tensor:
    """Positions of the first images // classes samples of each class, all classes alike, in order."""
    counts = torch.bincount(labels, minlength=classes)
    each = min(images // classes, int(counts.min()))
    rank = torch.zeros_like(labels)
    for label in range(classes):
        rank[labels == label] = torch.arange(int(counts[label]), device=labels.device)
    return (rank < each).nonzero()[:, 0]


@contextmanager
def watch(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect, batch by batch, what goes into the model's last linear layer (B, features)."""
    seen: list[Tensor] = []
    heads = [module for module in model.modules() if isinstance(module, nn.Linear)]
    hooks = [head.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach())) for head in heads[-1:]]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
