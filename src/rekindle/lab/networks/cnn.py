"""A small convolutional network without normalisation: nothing between the weights and what they do."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rekindle.lab.networks.sizes import activation as activation_class
from rekindle.lab.networks.sizes import at_least_one, image


class CNN(nn.Module):
    """3×3 convolutions that double in width, each halved in size by max pooling; a hidden layer; the head.

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
    ) -> None:
        super().__init__()
        channels, high, wide = image(shape)
        at_least_one(width=width, depth=depth, hidden=hidden)
        nonlinear = activation_class(activation)
        self.features = nn.Sequential()
        for out in (width * 2**stage for stage in range(depth)):
            self.features.extend([nn.Conv2d(channels, out, 3, padding=1), nonlinear()])
            channels = out
            if min(high, wide) > 1:
                self.features.append(nn.MaxPool2d(2))
                high, wide = high // 2, wide // 2
        self.hidden = nn.Sequential(nn.Flatten(), nn.Linear(channels * high * wide, hidden), nonlinear())
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (batch, classes) for images (batch, channels, height, width)."""
        # Faster on CPU, as in `resnet.py`.
        x = x.clone(memory_format=torch.channels_last)
        logits: Tensor = self.head(self.hidden(self.features(x)))
        return logits
