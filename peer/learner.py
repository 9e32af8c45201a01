"""How one peer learns and how its learning is measured: optimizer steps, predictions, class statistics, accuracies."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from topology.sections import TrainingSection

Batch = tuple[Tensor, Tensor]


def learning_rate(training: TrainingSection, round: int, rounds: int) -> float:
    """The rate of a round, 1-based: constant, or a cosine from the full rate in round 1 towards 0 after the last."""
    if training.schedule == "constant":
        return training.learning_rate
    return training.learning_rate * 0.5 * (1.0 + math.cos(math.pi * (round - 1) / rounds))


class Optimizer:
    """SGD with momentum, or Adam, over a model's parameters, with a fresh state.

    torch's functional forms, which are the same arithmetic: the classes import the compiler, 100 MB a process that
    is never used.
    """

    def __init__(self, model: nn.Module, training: TrainingSection, rate: float) -> None:
        self._parameters: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._training, self.rate = training, rate
        self._momentum: list[Tensor | None] = [None for _ in self._parameters]
        self._first = [torch.zeros_like(parameter) for parameter in self._parameters] if self._is_adam else []
        self._second = [torch.zeros_like(parameter) for parameter in self._parameters] if self._is_adam else []
        self._steps = [torch.tensor(0.0) for _ in self._parameters] if self._is_adam else []

    @property
    def _is_adam(self) -> bool:
        return self._training.optimizer == "adam"

    def step(self, loss: Tensor) -> None:
        """One step down the gradient of a loss."""
        gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        used = [index for index, gradient in enumerate(gradients) if gradient is not None]
        parameters = [self._parameters[index] for index in used]
        slopes = [gradient for gradient in gradients if gradient is not None]
        with torch.no_grad():
            if self._is_adam:
                adam(
                    parameters,
                    slopes,
                    [self._first[index] for index in used],
                    [self._second[index] for index in used],
                    [],
                    [self._steps[index] for index in used],
                    amsgrad=False,
                    beta1=0.9,
                    beta2=0.999,
                    lr=self.rate,
                    weight_decay=self._training.weight_decay,
                    eps=1e-8,
                    maximize=False,
                    foreach=False,
                )
            else:
                momentum = [self._momentum[index] for index in used]
                sgd(
                    parameters,
                    slopes,
                    momentum,
                    weight_decay=self._training.weight_decay,
                    momentum=self._training.momentum,
                    lr=self.rate,
                    dampening=0.0,
                    nesterov=False,
                    maximize=False,
                    foreach=False,
                )
                for index, buffer in zip(used, momentum, strict=True):
                    self._momentum[index] = buffer


@torch.no_grad()
def count_by_class(model: nn.Module, batches: Iterable[Batch], classes: int) -> tuple[Tensor, Tensor]:
    """Samples and correctly classified samples of each class, (C,) int64 each. The model is left in evaluation mode.

    An output beyond the classes, for "unknown", is no answer here: the best of the known classes is taken.
    """
    model.eval()
    samples, correct = torch.zeros(classes, dtype=torch.int64), torch.zeros(classes, dtype=torch.int64)
    for inputs, labels in batches:
        right = labels[(model(inputs)[:, :classes].argmax(dim=1) == labels)]
        samples += torch.bincount(labels, minlength=classes).cpu()
        correct += torch.bincount(right, minlength=classes).cpu()
    return samples, correct


def accuracy(samples: Tensor, correct: Tensor) -> float | None:
    """The fraction that is correct; None where there are no samples."""
    total = int(samples.sum())
    return int(correct.sum()) / total if total else None


def accuracy_by_class(logits: Tensor, labels: Tensor, classes: int) -> list[float | None]:
    """The fraction of each class's samples that is correct, C of them; None for a class without samples.

    As in `count_by_class`, an output beyond the classes is no answer.
    """
    right = labels[logits[:, :classes].argmax(1) == labels]
    samples, correct = (torch.bincount(which, minlength=classes).tolist() for which in (labels, right))
    return [hits / all_ if all_ else None for hits, all_ in zip(correct, samples, strict=True)]


def fraction_true(right: Tensor) -> float:
    """The fraction of (B,) bool that is true."""
    return float(right.double().mean())


def class_statistics(samples: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """What CRAD shares beside a snapshot: n_c (C,) int32 and accuracy a_c (C,) float32, 0 where there is no sample."""
    rate = torch.where(samples > 0, correct / samples.clamp(min=1), 0.0)
    return samples.to(torch.int32), rate.to(torch.float32)
