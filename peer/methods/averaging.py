"""Guarantees a weighted average of models: the same bits for the same models in the same order."""

from collections.abc import Mapping, Sequence
from math import inf

import torch
from torch import Tensor


def weighted_average(models: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """Sum over k of (w_k / sum of w) x_k, tensor by tensor: the step FedAvg and D-PSGD have in common.

    `models` map the same names to tensors of the same shapes; `weights` are one number >= 0 a model. Added up in
    float64 in the given order and cast back to the first model's dtypes, in new tensors without gradient.
    Raises ValueError when there is no model, weights are negative, all 0 or another number than the models, and,
    naming the tensor, for another name, shape or kind of number.
    """
    if len(models) == 0 or len(models) != len(weights):
        raise ValueError(f"there are {len(models)} models and {len(weights)} weights; each model needs one weight")
    total = sum(weights)
    if not (0 < total < inf and all(weight >= 0 for weight in weights)):
        raise ValueError(f"the models' weights are {list(weights)}; none may be below 0, and one must be above")
    first = models[0]
    for number, other in enumerate(models):
        _check_alike(first, other, number)
    averaged = {}
    for name, tensor in first.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{name!r} is {tensor.dtype}; only floating-point tensors can be averaged")
        average = torch.zeros_like(tensor, dtype=torch.float64)
        for weight, model in zip(weights, models, strict=True):
            average += (weight / total) * model[name].detach().double()
        averaged[name] = average.to(tensor.dtype)
    return averaged


def _check_alike(first: Mapping[str, Tensor], other: Mapping[str, Tensor], number: int) -> None:
    for name in [*first, *other]:
        if name not in first or name not in other or first[name].shape != other[name].shape:
            here = tuple(first[name].shape) if name in first else "absent"
            there = tuple(other[name].shape) if name in other else "absent"
            raise ValueError(
                f"{name!r} is {here} in model 0 and {there} in model {number}; parameters are averaged one by one, "
                "so all models need the same architecture"
            )
