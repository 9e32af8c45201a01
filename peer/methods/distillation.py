"""Guarantees that every distilling method softens, checks and learns from its teachers in the same way.

Shapes: J teachers, B samples, C classes. Equation numbers are those of "CRAD: Class-wise Reliability-Aware
Distillation for Decentralized Heterogeneous Federated Learning".
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor


def soften(logits: Tensor, temperature: float) -> Tensor:
    """Class probabilities (..., C) of `logits` (..., C) at `temperature` T: softmax(z / T) (CRAD, Eq. 2).

    In float32, or float64 for float64 logits. Raises ValueError for a temperature that is not above 0.
    """
    return _scale(logits, temperature).softmax(-1)


def check_teachers(q: Tensor) -> None:
    """Raise ValueError unless q (J, B, C), probabilities or logits, is finite, naming the first teacher that is not."""
    if q.dim() != 3 or 0 in q.shape[1:]:
        raise ValueError(
            f"the teachers' answers have shape {tuple(q.shape)}; they must be (teachers, samples, classes) "
            "with at least one sample and one class"
        )
    finite = q.isfinite()
    if not finite.all():
        teacher = int((~finite).flatten(1).any(1).nonzero()[0])
        raise ValueError(
            f"teacher {teacher} of {len(q)} gives answers that are not finite: its model has diverged; "
            "lower its learning rate, or leave it out"
        )


def check_choice(name: str, given: str, allowed: Iterable[str]) -> None:
    """Raise ValueError, listing what there is, unless `given` is among `allowed`."""
    if given not in allowed:
        raise ValueError(f"{name} is {given!r}; choose one of {', '.join(allowed)}")


def student_loss(
    logits: Tensor, labels: Tensor, target: Tensor | None, *, distillation_weight: float, temperature: float
) -> Tensor:
    """The student's loss, a scalar in nats (CRAD, Eqs. 9 and 10; Hinton et al. 2015 for the factor T^2).

        L = mean over b of  (1 - lambda) CE(z_b, y_b) + lambda T^2 KL(target_b || softmax(z_b / T))

    `logits` z (B, C) carry the gradient; `labels` y (B,) are class ids; `target` (B, C) is a constant. A row
    of zeros is no target: that sample learns by cross-entropy with weight 1, as all do when `target` is None.
    Raises ValueError for a target of another shape, a weight outside 0..1 or a temperature not above 0.
    """
    if not 0 <= distillation_weight <= 1:
        raise ValueError(f"distillation_weight is {distillation_weight}; it must lie in 0..1")
    softened = _scale(logits, temperature).log_softmax(-1)
    if target is None:
        target = torch.zeros_like(softened)
    elif target.shape != logits.shape:
        raise ValueError(
            f"the target has shape {tuple(target.shape)}, the student's logits have {tuple(logits.shape)}; "
            "both must be (samples, classes)"
        )
    target = target.detach().to(softened.dtype)
    weight = distillation_weight * (target.sum(1) > 0).to(softened.dtype)
    cross_entropy = F.cross_entropy(_scale(logits, 1.0), labels, reduction="none")
    divergence = F.kl_div(softened, target, reduction="none").sum(1)  # 0 log 0 counts as 0
    return ((1 - weight) * cross_entropy + weight * temperature**2 * divergence).mean()


def check_lesson(teacher: Tensor, logits: Tensor) -> None:
    """Raise ValueError unless teacher and logits are both (B, C) with at least one sample: no mean without one."""
    if teacher.shape != logits.shape or logits.dim() != 2 or 0 in logits.shape:
        raise ValueError(
            f"the teacher has shape {tuple(teacher.shape)}, the student's logits have {tuple(logits.shape)}; both "
            "must be (samples, classes) with at least one sample"
        )


def teaching_loss(teacher: Tensor, logits: Tensor) -> Tensor:
    """Mean over the samples of KL(teacher_b || softmax(z_b)), in nats: what has no labels learns by this alone.

    `teacher` (B, C) holds probabilities and is a constant, 0 log 0 counting as 0; `logits` z (B, C) carry the
    gradient. Raises ValueError for another shape, or without a sample.
    """
    check_lesson(teacher, logits)
    student = _scale(logits, 1.0).log_softmax(-1)
    return F.kl_div(student, teacher.detach().to(student.dtype), reduction="batchmean")


def _scale(logits: Tensor, temperature: float) -> Tensor:
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0")
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
