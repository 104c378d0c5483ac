"""ResNet-18, of any width: residual blocks with BatchNorm, where warm starting is known to hurt.

Modules are named and ordered as in torchvision, so that weights go back and forth.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rekindle.lab.networks.sizes import at_least_one, image

Stem = Literal["cifar", "imagenet"]


class Block(nn.Module):
    """Two 3×3 convolutions beside a shortcut, which is a 1×1 convolution where the size changes.

    >>> Block(4, 8, stride=2)(torch.zeros(2, 4, 6, 6)).shape
    torch.Size([2, 8, 3, 3])
    """

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

    `stem="cifar"` keeps the size of small images by a 3×3 convolution; `"imagenet"` quarters it by 7×7 and pooling.

    >>> ResNet18((3, 16, 16), 10, width=8)(torch.zeros(2, 3, 16, 16)).shape
    torch.Size([2, 10])
    """

    def __init__(self, shape: tuple[int, ...], classes: int, *, width: int = 64, stem: Stem = "cifar") -> None:
        super().__init__()
        channels, *_ = image(shape)
        at_least_one(width=width)
        if stem not in get_args(Stem):
            raise ValueError(f"stem={stem!r} must be one of {', '.join(get_args(Stem))}")
        # A fifth faster a step on CPU. Not for other widths: torch 2.13's backward of a strided 1×1 convolution from 4
        # to 8 channels writes beyond its memory in this format.
        self.channels_last = width % 8 == 0
        small = stem == "cifar"
        self.conv1 = nn.Conv2d(channels, width, 3 if small else 7, 1 if small else 2, 1 if small else 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Block(width, width), Block(width, width))
        self.layer2 = nn.Sequential(Block(width, 2 * width, 2), Block(2 * width, 2 * width))
        self.layer3 = nn.Sequential(Block(2 * width, 4 * width, 2), Block(4 * width, 4 * width))
        self.layer4 = nn.Sequential(Block(4 * width, 8 * width, 2), Block(8 * width, 8 * width))
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
