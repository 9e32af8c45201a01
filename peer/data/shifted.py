"""Images that a tiny CLIP has never seen, turned by 20 degrees: what its zero-shot answers are half wrong about."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from peer.data import sets
from peer.models import tiny_clip
from topology.errors import TopologyError
from topology.mistakes import suggestion
from topology.seeds import stream


@dataclass(frozen=True)
class Shift:
    """How many images the federation gets, and how far they are turned."""

    train: int
    test: int
    degrees: float = 20.0


SHIFTS = {"fashion-mnist": Shift(6000, 4000), "digits": Shift(600, 360)}


def load(recipe: str, root: str) -> sets.DataSet:
    """The data set `shifted:RECIPE`: normalized as the recipe's own, for so the model was trained."""
    if recipe not in SHIFTS:
        raise TopologyError(
            f"data.name = 'shifted:{recipe}': there is no such recipe.{suggestion(recipe, SHIFTS)} There are "
            f"{', '.join(SHIFTS)}"
        )
    shift, known = SHIFTS[recipe], tiny_clip.RECIPES[recipe]
    data = sets.load(known.data, root)
    _, left = tiny_clip.split(known, data)
    draw = stream(known.seed, "shifted")
    train = np.sort(draw.permutation(left)[: shift.train])
    test = np.sort(draw.permutation(len(data.y_test))[: shift.test])
    return replace(
        data,
        name=f"shifted:{recipe}",
        x_train=turn(data.x_train[train], shift.degrees),
        y_train=data.y_train[train],
        x_test=turn(data.x_test[test], shift.degrees),
        y_test=data.y_test[test],
    )


def turn(images: NDArray[np.uint8], degrees: float) -> NDArray[np.uint8]:
    """Images (N, H, W, C) turned about their middle, black where nothing was."""
    angle = torch.tensor(degrees).deg2rad()
    row = torch.stack([angle.cos(), -angle.sin(), torch.tensor(0.0)])
    other = torch.stack([angle.sin(), angle.cos(), torch.tensor(0.0)])
    x = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2), dtype=np.float32))
    grid = F.affine_grid(torch.stack([row, other]).expand(len(x), 2, 3), list(x.shape), align_corners=False)
    turned = F.grid_sample(x, grid, align_corners=False).round().clamp(0, 255).to(torch.uint8)
    return np.ascontiguousarray(turned.numpy().transpose(0, 2, 3, 1))
