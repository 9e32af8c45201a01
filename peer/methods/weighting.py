"""Guarantees finite weights of 0 or more, from what each teacher measured of itself: CRAD's rule and others.

CRAD: Class-wise Reliability-Aware Distillation for Decentralized Heterogeneous Federated Learning, Eqs. 6, 7.
For J teachers and C classes, n (J, C) counts the validation samples of each class and a (J, C) is the share
of them classified right, in 0..1. Everything is computed in float64.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from peer.methods.distillation import check_choice

Z = 1.96  # standard normal quantile of a two-sided 95 % interval
EPSILON = 1e-12  # after the correction no variance is 0; a larger guard would bias the smallest, about 2e-6


class Evidence(NamedTuple):
    """What a weight rule may look at; tensors are (J, C) float64."""

    n: Tensor
    a: Tensor
    p_tilde: Tensor
    variance: Tensor
    z: float
    epsilon: float


def _precision(of: Evidence) -> Tensor:
    return 1 / (of.variance + of.epsilon)


def _raw_precision(of: Evidence) -> Tensor:
    return 1 / (of.a * (1 - of.a) / of.n.clamp(min=1) + of.epsilon)


def _wilson_lower(of: Evidence) -> Tensor:
    # n a^2 over the larger root, and not center minus radius: exactly 0, free of rounding, where a is 0
    n, a, half = of.n, of.a, of.z / 2
    return n * a**2 / (n * a + 2 * half**2 + 2 * half * (n * a * (1 - a) + half**2).sqrt())


WEIGHTINGS: dict[str, Callable[[Evidence], Tensor]] = {
    "precision": _precision,  # Eq. 7, CRAD
    "accuracy": lambda of: of.a,
    "support": lambda of: of.n,
    "inv_std": lambda of: _precision(of).sqrt(),
    "accuracy_x_support": lambda of: of.a * of.n,
    "raw_precision": _raw_precision,  # without the Agresti-Coull correction
    "wilson_lower": _wilson_lower,
    "ac_accuracy": lambda of: of.p_tilde,
    "log_support": lambda of: of.n.log1p(),
    "uniform": lambda of: torch.ones_like(of.a),  # agreement only, the paper's Stage 1
    "gated_precision": lambda of: _precision(of) * (of.p_tilde >= 0.5),  # ours: decisive, and right
}


def agresti_coull(n: Tensor, a: Tensor, z: float = Z) -> tuple[Tensor, Tensor]:
    """Corrected accuracy p_tilde and its variance, (J, C) float64 each: Agresti and Coull's (CRAD, Eq. 6)."""
    n, a = n.double(), a.double()
    n_tilde = n + z**2
    p_tilde = (a * n + z**2 / 2) / n_tilde
    return p_tilde, p_tilde * (1 - p_tilde) / n_tilde


def class_weights(
    n: Tensor, a: Tensor, *, weighting: str = "precision", z: float = Z, epsilon: float = EPSILON
) -> Tensor:
    """Weight (J, C) float64 of each teacher for each class, by a rule of `WEIGHTINGS` (CRAD, Eq. 7).

    Precision is symmetric in a and 1 - a, and not 0 at n = 0: it is the filters that remove the uninformed.
    Raises ValueError for an unknown rule, shapes that differ, an accuracy outside 0..1, and for z or epsilon
    that is not above 0.
    """
    check_choice("weighting", weighting, WEIGHTINGS)
    _check_statistics(n, a)
    if not (z > 0 and epsilon > 0):
        raise ValueError(f"z is {z} and epsilon is {epsilon}; both must be above 0")
    return WEIGHTINGS[weighting](Evidence(n.double(), a.double(), *agresti_coull(n, a, z), z, epsilon))


def _check_statistics(n: Tensor, a: Tensor) -> None:
    if n.dim() != 2 or n.shape != a.shape:
        raise ValueError(f"n has shape {tuple(n.shape)} and a has {tuple(a.shape)}; both must be (teachers, classes)")
    wrong = ~((a >= 0) & (a <= 1))
    if wrong.any():
        teacher, label = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"teacher {teacher} reports accuracy {a[teacher, label].item()} for class {label}; "
            "it must lie in 0..1, and be 0 for a class without samples"
        )
