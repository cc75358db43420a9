"""Whole networks as users bring them, at their usual size, for the conformance suite and the benchmarks.

Each is written from its paper's description: MobileNetV3 (Howard 2019), ResNet-18 in its CIFAR form (He 2016), the
keyword-spotting DS-CNN (Zhang 2017), and a one-dimensional CNN over windows of phone accelerometer data.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from coordinator.models.registry import ModelEntry


class SqueezeExcite(nn.Module):
    """Channels weighed by what all places together say."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = max(8, channels // 4)
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, inner, 1),
            nn.ReLU(),
            nn.Conv2d(inner, channels, 1),
            nn.Hardsigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x)  # type: ignore[no-any-return]


class InvertedResidual(nn.Module):
    """Widen, a depthwise convolution, squeeze-excite, narrow; added to the input where shapes allow."""

    def __init__(self, ins: int, wide: int, outs: int, *, kernel: int, stride: int, act: type[nn.Module]) -> None:
        super().__init__()
        self.adds = stride == 1 and ins == outs
        self.body = nn.Sequential(
            nn.Conv2d(ins, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            act(),
            nn.Conv2d(wide, wide, kernel, stride=stride, padding=kernel // 2, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            SqueezeExcite(wide),
            act(),
            nn.Conv2d(wide, outs, 1, bias=False),
            nn.BatchNorm2d(outs),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return x + out if self.adds else out


def mobilenet_v3(classes: int = 10) -> nn.Module:
    """A MobileNetV3-small for 32 x 32 images: depthwise and 5 x 5 kernels, hard-swish, squeeze-excite, dropout."""
    rows = [
        InvertedResidual(16, 16, 16, kernel=3, stride=2, act=nn.ReLU),
        InvertedResidual(16, 72, 24, kernel=3, stride=1, act=nn.ReLU),
        InvertedResidual(24, 96, 40, kernel=5, stride=2, act=nn.Hardswish),
        InvertedResidual(40, 120, 40, kernel=5, stride=1, act=nn.Hardswish),
    ]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.Hardswish(),
        *rows,
        nn.Conv2d(40, 144, 1, bias=False),
        nn.BatchNorm2d(144),
        nn.Hardswish(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(144, 128),
        nn.Hardswish(),
        nn.Dropout(0.2),
        nn.Linear(128, classes),
    )


class Residual(nn.Module):
    """Two 3 x 3 convolutions with batch norm, and a shortcut."""

    def __init__(self, ins: int, outs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(ins, outs, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(outs),
            nn.ReLU(),
            nn.Conv2d(outs, outs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outs),
        )
        same = stride == 1 and ins == outs
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(ins, outs, 1, stride=stride, bias=False), nn.BatchNorm2d(outs))
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet18(width: int = 64, classes: int = 10, *, imagenet_stem: bool = False) -> nn.Module:
    """Four stages of two residual blocks; `imagenet_stem`: a 7 x 7 convolution and an overlapping, padded max-pool."""
    stem: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    if imagenet_stem:
        stem[0] = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        stem.append(nn.MaxPool2d(3, stride=2, padding=1))
    stages: list[nn.Module] = []
    ins = width
    for outs, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
        stages += [Residual(ins, outs, stride), Residual(outs, outs, 1)]
        ins = outs
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(ins, classes))


def ds_cnn(channels: int = 64, classes: int = 12) -> nn.Module:
    """Keyword spotting on 49 frames of 10 coefficients: one convolution, four depthwise separable ones."""
    layers: list[nn.Module] = [
        nn.Conv2d(1, channels, (10, 4), stride=(2, 2), padding=(5, 1), bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
    ]
    for _ in range(4):
        layers += [
            nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.Dropout(0.2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def har_cnn(classes: int = 6) -> nn.Module:
    """Activity recognition: windows of 128 readings of 9 channels, three one-dimensional convolutions."""
    return nn.Sequential(
        nn.Conv1d(9, 64, 5, padding=2),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Conv1d(64, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Conv1d(64, 96, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(96, classes),
    )


ENTRIES = {
    "mobilenet-v3": ModelEntry(make=mobilenet_v3, input=(3, 32, 32), classes=10),
    "resnet-18": ModelEntry(make=resnet18, input=(3, 32, 32), classes=10),
    "resnet-18-narrow": ModelEntry(make=lambda: resnet18(8, imagenet_stem=True), input=(3, 64, 64), classes=10),
    "ds-cnn": ModelEntry(make=ds_cnn, input=(1, 49, 10), classes=12),
    "har-cnn": ModelEntry(make=har_cnn, input=(9, 128), classes=6),
}
