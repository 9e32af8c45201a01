"""`swarm pretrain-clip`: trains the small CLIP of a recipe once on this machine."""

import time

from rich.console import Console

from peer.data import sets, shifted
from peer.models import tiny_clip
from peer.models.cache import cache_folder
from topology import TopologyError
from topology.mistakes import suggestion


def pretrain(recipe: str, console: Console) -> None:
    """Train it, or find it there, and say how good it is on the images it knows and on those it is to learn."""
    if recipe not in tiny_clip.RECIPES:
        raise TopologyError(
            f"RECIPE: there is no {recipe!r}.{suggestion(recipe, tiny_clip.RECIPES)} There are "
            f"{', '.join(tiny_clip.RECIPES)}"
        )
    known, began = tiny_clip.RECIPES[recipe], time.monotonic()
    data = sets.load(known.data)

    def tell(epoch: int, loss: float) -> None:
        console.print(f"epoch {epoch:>2}/{known.epochs}  loss {loss:.3f}  {time.monotonic() - began:.0f} s")

    backbone = tiny_clip.obtain(known, data, cache_folder(), tell)
    parameters = sum(parameter.numel() for parameter in backbone.model.parameters())
    console.print(
        f"{tiny_clip.file(known, cache_folder())}: {parameters:,} parameters; zero-shot accuracy "
        f"{tiny_clip.zero_shot_accuracy(backbone, data):.3f} on its test images, "
        f"{tiny_clip.zero_shot_accuracy(backbone, shifted.load(recipe, '')):.3f} on those that shifted:{recipe} has",
        highlight=False,
        soft_wrap=True,
    )
