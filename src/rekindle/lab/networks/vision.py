"""Networks for images without attention: MLP, CNN, ResNet-18 and VGG-16, each of any width.

What a network is asked for (shapes, counts, names of activations) is checked before anything is built.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS: Final[Mapping[str, type[nn.Module]]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
}


def image(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The shape as (channels, height, width), or an error."""
    if len(shape) != 3 or min(shape) < 1:
        raise ValueError(f"shape={shape} must be (channels, height, width) for a network that looks at images")
    channels, height, width = shape
    return channels, height, width


def at_least_one(**sizes: int) -> None:
    """An error that names the first size that is not a positive whole number."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name}={size!r} must be a whole number of at least 1")


def activation_class(name: str) -> type[nn.Module]:
    """The class of an activation."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation={name!r} must be one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


Stem = Literal["cifar", "imagenet"]

# Channels as multiples of the width; a pooling after each group.
_GROUPS = ((1, 1), (2, 2), (4, 4, 4), (8, 8, 8), (8, 8, 8))


class MLP(nn.Module):
    """Any number of hidden layers over the flattened input, then the head; torch's default start.

    Loss of plasticity shows soonest and cheapest here.

    `width` is one number for all `depth` hidden layers (3 unless told), or a list with one number per layer.
    Without hidden layers (`depth=0`) it is a linear classifier. `norm` is "layer" or "batch" for a normalization before
    every activation.

    >>> MLP((1, 28, 28), 10)
    MLP(
      (body): Sequential(
        (0): Flatten(start_dim=1, end_dim=-1)
        (1): Linear(in_features=784, out_features=128, bias=True)
        (2): ReLU()
        (3): Linear(in_features=128, out_features=128, bias=True)
        (4): ReLU()
        (5): Linear(in_features=128, out_features=128, bias=True)
        (6): ReLU()
      )
      (head): Linear(in_features=128, out_features=10, bias=True)
    )
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        *,
        width: int | Sequence[int] = 128,
        depth: int | None = None,
        activation: str = "relu",
        norm: str | None = None,
    ) -> None:
        super().__init__()
        widths = [math.prod(shape), *_widths(width, depth)]
        nonlinear = activation_class(activation)
        self.body = nn.Sequential(nn.Flatten())
        for into, out in pairwise(widths):
            self.body.extend([nn.Linear(into, out), *_norm(norm, nn.BatchNorm1d, out), nonlinear()])
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (batch, classes) for inputs (batch, *shape)."""
        logits: Tensor = self.head(self.body(x))
        return logits


def _widths(width: int | Sequence[int], depth: int | None) -> list[int]:
    if isinstance(width, int):
        at_least_one(width=width)
        if depth is not None and depth < 0:
            raise ValueError(f"depth={depth} must be 0 or more")
        return [width] * (3 if depth is None else depth)
    if depth not in (None, len(width)):
        raise ValueError(f"depth={depth} contradicts width={list(width)}, which has one number per hidden layer")
    for each in width:
        at_least_one(width=each)
    return list(width)


def _norm(name: str | None, batch: type[nn.Module], width: int) -> list[nn.Module]:
    known = {None: [], "batch": [batch], "layer": [nn.LayerNorm] if batch is nn.BatchNorm1d else None}
    if known.get(name) is None:
        raise ValueError(f"norm={name!r} must be None, 'batch', or 'layer' (of an MLP)")
    return [kind(width) for kind in known[name] or ()]


class CNN(nn.Module):
    """3×3 convolutions that double in width, each halved in size by max pooling; a hidden layer; the head.

    Without `norm="batch"` no normalization stands between the weights and what they do.
    Pooling stops where nothing is left to halve, so any image size will do.

    >>> CNN((1, 8, 8), 10, width=4, hidden=16)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        *,
        width: int = 32,
        depth: int = 3,
        hidden: int = 128,
        activation: str = "relu",
        norm: str | None = None,
    ) -> None:
        super().__init__()
        channels, high, wide = image(shape)
        at_least_one(width=width, depth=depth, hidden=hidden)
        nonlinear = activation_class(activation)
        self.features = nn.Sequential()
        for out in (width * 2**stage for stage in range(depth)):
            self.features.extend(
                [nn.Conv2d(channels, out, 3, padding=1), *_norm(norm, nn.BatchNorm2d, out), nonlinear()]
            )
            channels = out
            if min(high, wide) > 1:
                self.features.append(nn.MaxPool2d(2))
                high, wide = high // 2, wide // 2
        self.hidden = nn.Sequential(nn.Flatten(), nn.Linear(channels * high * wide, hidden), nonlinear())
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (batch, classes) for images (batch, channels, height, width)."""
        # Faster on CPU, as in `ResNet18`.
        x = x.clone(memory_format=torch.channels_last)
        logits: Tensor = self.head(self.hidden(self.features(x)))
        return logits


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut, which is a 1×1 convolution where the size changes."""

    def __init__(self, into: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or into != out:
            self.downsample = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, into, height, width) → (batch, out, height / stride, width / stride)."""
        shortcut = x if self.downsample is None else self.downsample(x)
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + shortcut)


class ResNet18(nn.Module):
    """Four stages of two blocks with `width`, 2·, 4· and 8·`width` channels; torch's default start.

    Warm starting is known to hurt it. Modules are named and ordered as in torchvision, so that weights can be
    exchanged. `stem="cifar"` keeps the size of small images by a 3×3 convolution; `"imagenet"` quarters it by 7×7 and
    pooling.

    >>> ResNet18((3, 16, 16), 10, width=8)(torch.zeros(2, 3, 16, 16)).shape
    torch.Size([2, 10])
    """

    def __init__(self, shape: tuple[int, ...], classes: int, *, width: int = 64, stem: Stem = "cifar") -> None:
        super().__init__()
        channels, *_ = image(shape)
        at_least_one(width=width)
        if stem not in get_args(Stem):
            raise ValueError(f"stem={stem!r} must be one of {', '.join(get_args(Stem))}")
        # A fifth faster per step on CPU. Not for other widths: torch 2.13's backward of a strided 1×1 convolution from
        # 4 to 8 channels writes beyond its memory in this format.
        self.channels_last = width % 8 == 0
        small = stem == "cifar"
        self.conv1 = nn.Conv2d(channels, width, 3 if small else 7, 1 if small else 2, 1 if small else 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(ResidualBlock(width, width), ResidualBlock(width, width))
        self.layer2 = nn.Sequential(ResidualBlock(width, 2 * width, 2), ResidualBlock(2 * width, 2 * width))
        self.layer3 = nn.Sequential(ResidualBlock(2 * width, 4 * width, 2), ResidualBlock(4 * width, 4 * width))
        self.layer4 = nn.Sequential(ResidualBlock(4 * width, 8 * width, 2), ResidualBlock(8 * width, 8 * width))
        self.fc = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (batch, classes) for images (batch, channels, height, width)."""
        if self.channels_last:
            # Not `contiguous`, which leaves a single channel as it is, and with it everything behind.
            x = x.clone(memory_format=torch.channels_last)
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


class VGG16(nn.Module):
    """VGG-16 with BatchNorm: thirteen convolutions without a shortcut, average pooling, one layer as the classifier.

    A max pooling that would leave nothing of a small image is left out. Convolutions are named and ordered as in
    torchvision where the image is at least 32×32.

    >>> VGG16((3, 16, 16), 10, width=4)(torch.zeros(2, 3, 16, 16)).shape
    torch.Size([2, 10])
    """

    def __init__(self, shape: tuple[int, ...], classes: int, *, width: int = 64) -> None:
        super().__init__()
        channels, *size = image(shape)
        at_least_one(width=width)
        smallest = min(size)
        self.features = nn.Sequential()
        for group in _GROUPS:
            for out in (times * width for times in group):
                self.features.extend([nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()])
                channels = out
            if smallest > 1:
                self.features.append(nn.MaxPool2d(2))
                smallest //= 2
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Linear(channels, classes))

    def forward(self, x: Tensor) -> Tensor:
        """Logits (batch, classes) for images (batch, channels, height, width)."""
        # Faster on CPU, as in `ResNet18`.
        x = x.clone(memory_format=torch.channels_last)
        logits: Tensor = self.classifier(self.avgpool(self.features(x)).flatten(1))
        return logits
