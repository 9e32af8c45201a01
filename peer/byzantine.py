"""What a lying peer says in place of the truth: other weights, other statistics, or what it learnt from wrong labels.

Its own model is never touched, but for `label_flip`, which is a lie that the peer itself believes. A lie is logged once
a round, before it is told; how many neighbors hear it is a matter of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from topology.errors import TopologyError
from topology.faults import Byzantine, Told
from topology.reach import in_rounds
from transport.faultlog import FaultLog

if TYPE_CHECKING:
    from peer.plan import Plan

Message = Mapping[str, Tensor]
OF_WEIGHTS: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "nan": lambda truth, _: torch.full_like(truth, torch.nan),
    "scale": lambda truth, factor: truth * factor,
    "sign_flip": lambda truth, _: -truth,
}


class Lies:
    """What one peer's rules make of what it says. Its `label_flip` is in the labels, and all else in its messages."""

    def __init__(self, rules: list[Byzantine], log: FaultLog) -> None:
        self._log = log
        self._rules = [rule for rule in rules if rule.mode in get_args(Told)]
        self._told: set[tuple[str, int]] = set()
        self._before: dict[tuple[int, int], Message] = {}

    def messages(self, round: int, exchange: int, truths: Mapping[int, Message]) -> Mapping[int, Message]:
        """What each neighbor is told. Those that would get the same truth get the same lie."""
        told: dict[int, Message] = {}
        of_truth: dict[int, Message] = {}
        for receiver, truth in truths.items():
            if id(truth) not in of_truth:
                of_truth[id(truth)] = self._message(round, self._before.get((receiver, exchange), {}), truth)
            told[receiver] = of_truth[id(truth)]
        if any(rule.mode == "stale" for rule in self._rules):
            copies = {id(truth): _copy(truth) for truth in truths.values()}
            self._before |= {(receiver, exchange): copies[id(truth)] for receiver, truth in truths.items()}
        return told

    def labels(self, round: int, truths: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
        """The labels it learns from in a round."""
        for rule in self._rules:
            if rule.mode == "label_flip" and in_rounds(round, rule.rounds):
                self._note(rule, round)
                return (truths + 1) % classes
        return truths

    def _message(self, round: int, before: Message, message: Message) -> Message:
        for rule in self._rules:
            if rule.mode != "label_flip" and in_rounds(round, rule.rounds):
                lie = _lie(rule, before, message)
                if lie is not message:  # a stale message needs an earlier one
                    self._note(rule, round)
                message = lie
        return message

    def _note(self, rule: Byzantine, round: int) -> None:
        if (rule.id, round) not in self._told:
            self._told.add((rule.id, round))
            self._log.write(rule, peer=rule.peer, round=round, mode=rule.mode)


def _lie(rule: Byzantine, before: Message, truth: Message) -> Message:
    if rule.mode == "stale":
        return {name: before.get(name, tensor) for name, tensor in truth.items()} if before else truth
    if rule.mode == "lying_statistics":
        return dict(truth) | {
            "n": torch.full_like(truth["n"], rule.samples),
            "a": torch.ones_like(truth["a"]),
        }
    change = OF_WEIGHTS[rule.mode]
    return {
        name: change(tensor, rule.factor) if tensor.is_floating_point() and name != "a" else tensor
        for name, tensor in truth.items()
    }


def _copy(message: Message) -> Message:
    return {name: tensor.detach().clone() for name, tensor in message.items()}


def check_lies(plan: Plan) -> None:
    """Raise `TopologyError` for a lie about something that the method never says."""
    method = plan.topology.method.name
    for rule in plan.topology.fault:
        if not isinstance(rule, Byzantine) or rule.mode not in get_args(Told):
            continue
        given = f"[[fault]] {rule.id}: mode = {rule.mode!r}: the method {method!r}"
        if rule.mode == "label_flip":
            if not plan.method.learns_from_labels:
                raise TopologyError(f"{given} does not learn from labels. Choose another mode or method")
            if len(plan.shards[rule.peer].train) == 0:
                raise TopologyError(f"[[fault]] {rule.id}: peer = {rule.peer}: it has no samples to learn from")
            continue
        said = plan.facts[rule.peer].message.fields
        if not said:
            raise TopologyError(f"{given} shares nothing, so there is nothing to lie about. Choose another method")
        if rule.mode == "lying_statistics" and not {"n", "a"} <= {field.name for field in said}:
            raise TopologyError(f"{given} shares no statistics. Choose another mode, or method.name = 'crad'")
