"""Residual networks with basic blocks for small images: 3x3 stem of stride 1, no max-pool, 8x8 pixels and up.

He et al., "Deep Residual Learning for Image Recognition" (2016): the stages of its ImageNet networks with
projection shortcuts (B), and its CIFAR networks of depth 6n+2 with parameter-free shortcuts (A).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional


class PadShortcut(nn.Module):
    """Shortcut A: take every second pixel and fill the new channels with zeros, half on either side."""

    def __init__(self, new_channels: int) -> None:
        super().__init__()
        self.before = new_channels // 2
        self.after = new_channels - self.before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.before, self.after))


class BasicBlock(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, stride: int, *, projection: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 and projection:
            convolution = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(channels_out))
        elif stride != 1:
            self.shortcut = PadShortcut(channels_out - channels_in)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return functional.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """Stages of width, 2*width, 4*width, ... channels; all but the first halve the image."""

    def __init__(self, channels: int, classes: int, *, width: int, blocks: Sequence[int], projection: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        layers: list[nn.Module] = []
        before = width
        for stage, count in enumerate(blocks):
            after = width * 2**stage
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(BasicBlock(before, after, stride, projection=projection))
                before = after
        self.blocks = nn.Sequential(*layers)
        self.linear = nn.Linear(before, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.blocks(functional.relu(self.bn(self.conv(x))))
        logits: torch.Tensor = self.linear(y.mean((2, 3)))
        return logits
