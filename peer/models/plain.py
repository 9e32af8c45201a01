"""Networks without shortcuts: two convolutional ones and a multilayer perceptron."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class GlobalAverage(nn.Module):
    # Not AdaptiveAvgPool2d, whose gradient is not deterministic on CUDA.
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))


def build_cnn6(shape: tuple[int, int, int], classes: int) -> nn.Module:
    channels, height, width = shape
    features = 128 * (height // 8) * (width // 8)
    return nn.Sequential(
        *_convolve(channels, 32),
        *_convolve(32, 32),
        nn.MaxPool2d(2),
        *_convolve(32, 64),
        *_convolve(64, 64),
        nn.MaxPool2d(2),
        *_convolve(64, 128),
        *_convolve(128, 128),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(features, 256),
        nn.ReLU(),
        nn.Linear(256, classes),
    )


def build_cnn3(shape: tuple[int, int, int], classes: int, width: int) -> nn.Module:
    return nn.Sequential(
        *_convolve(shape[0], width),
        nn.MaxPool2d(2),
        *_convolve(width, 2 * width),
        nn.MaxPool2d(2),
        *_convolve(2 * width, 4 * width),
        GlobalAverage(),
        nn.Linear(4 * width, classes),
    )


def build_mlp(shape: tuple[int, int, int], classes: int, hidden: Sequence[int]) -> nn.Module:
    channels, height, width = shape
    layers: list[nn.Module] = [nn.Flatten()]
    before = channels * height * width
    for after in hidden:
        layers += [nn.Linear(before, after), nn.ReLU()]
        before = after
    return nn.Sequential(*layers, nn.Linear(before, classes))


def _convolve(channels_in: int, channels_out: int) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
    return convolution, nn.BatchNorm2d(channels_out), nn.ReLU()
