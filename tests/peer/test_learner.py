"""The optimizers are torch's own arithmetic, the schedule is the cosine it says, statistics are counted right."""

import math
import sys

import pytest
import torch
from torch import nn

from peer.learner import Optimizer, accuracy, accuracy_by_class, class_statistics, count_by_class, learning_rate
from topology.sections import TrainingSection


def small_network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_steps_equal_those_of_torch(optimizer: str) -> None:
    training = TrainingSection(optimizer=optimizer, learning_rate=0.05, momentum=0.9, weight_decay=0.01)
    ours, theirs = small_network(), small_network()
    mine = Optimizer(ours, training, 0.05)
    reference = (
        torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01, foreach=False)
        if optimizer == "sgd"
        else torch.optim.Adam(theirs.parameters(), lr=0.05, weight_decay=0.01, foreach=False)
    )
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        x, y = torch.randn(4, 5, generator=generator), torch.randint(3, (4,), generator=generator)
        mine.step(nn.functional.cross_entropy(ours(x), y))
        reference.zero_grad()
        nn.functional.cross_entropy(theirs(x), y).backward()
        reference.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_parameter_that_the_loss_does_not_use_is_left_alone() -> None:
    network = small_network()
    before = network[2].weight.clone()
    Optimizer(network, TrainingSection(), 0.1).step(network[0](torch.ones(2, 5)).sum())
    assert torch.equal(network[2].weight, before)


def test_learning_does_not_load_the_compiler() -> None:
    # It would cost 100 MB in each of a hundred processes.
    script = (
        "import sys, torch; from peer.learner import Optimizer; from topology.sections import TrainingSection\n"
        "m = torch.nn.Linear(2, 2); Optimizer(m, TrainingSection(), 0.1).step(m(torch.ones(1, 2)).sum())\n"
        "assert 'torch._dynamo' not in sys.modules, 'torch._dynamo is loaded'"
    )
    import subprocess

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_learning_rate_of_a_round() -> None:
    cosine = TrainingSection(learning_rate=0.4)
    assert learning_rate(cosine, 1, 100) == 0.4
    assert learning_rate(cosine, 51, 100) == pytest.approx(0.2)
    assert learning_rate(cosine, 100, 100) == pytest.approx(0.2 * (1 + math.cos(0.99 * math.pi)))
    assert learning_rate(TrainingSection(learning_rate=0.4, schedule="constant"), 70, 100) == 0.4


class Echo(nn.Module):
    """Predicts the class that its input names."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.one_hot(x.long().flatten(), 4).float()


def test_statistics_by_class() -> None:
    shown = torch.tensor([0.0, 0, 1, 2, 2, 2])
    labels = torch.tensor([0, 1, 1, 2, 2, 0])
    batches = [(shown[:4], labels[:4]), (shown[4:], labels[4:])]
    samples, correct = count_by_class(Echo().train(), batches, 4)
    assert samples.tolist() == [2, 2, 2, 0]
    assert correct.tolist() == [1, 1, 2, 0]
    n, a = class_statistics(samples, correct)
    assert n.dtype == torch.int32 and n.tolist() == [2, 2, 2, 0]
    assert a.dtype == torch.float32 and a.tolist() == [0.5, 0.5, 1.0, 0.0]  # 0 without samples, never NaN
    assert accuracy(samples, correct) == 4 / 6
    assert accuracy(torch.zeros(4), torch.zeros(4)) is None


def test_accuracy_by_class_knows_no_class_that_is_not_there_and_no_answer_beyond_them() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, 9.0], [0.0, 3.0, 1.0, 9.0], [5.0, 4.0, 0.0, 9.0]])
    assert accuracy_by_class(logits, torch.tensor([0, 1, 1]), 3) == [1.0, 0.5, None]
