"""VGG-16 with BatchNorm: thirteen convolutions in a row, no shortcut past any of them.

Modules are named and ordered as in torchvision where the image is at least 32×32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rekindle.lab.networks.sizes import at_least_one, image

# Channels as multiples of the width; a pooling after each group.
_GROUPS = ((1, 1), (2, 2), (4, 4, 4), (8, 8, 8), (8, 8, 8))


class VGG16(nn.Module):
    """Convolutions with BatchNorm, average pooling to `pool`×`pool`, and a classifier; torch's default start.

    For small images the classifier is one layer. `hidden=(4096, 4096), pool=7` is the original, with `dropout`
    after each hidden layer. A max pooling that would leave nothing of a small image is left out.

    >>> VGG16((3, 16, 16), 10, width=4)(torch.zeros(2, 3, 16, 16)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        *,
        width: int = 64,
        hidden: Sequence[int] = (),
        pool: int = 1,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        channels, *size = image(shape)
        at_least_one(width=width, pool=pool)
        smallest = min(size)
        self.features = nn.Sequential()
        for group in _GROUPS:
            for out in (times * width for times in group):
                self.features.extend([nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()])
                channels = out
            if smallest > 1:
                self.features.append(nn.MaxPool2d(2))
                smallest //= 2
        self.avgpool = nn.AdaptiveAvgPool2d(pool)
        self.classifier = nn.Sequential()
        into = channels * pool**2
        for out in hidden:
            at_least_one(hidden=out)
            self.classifier.extend([nn.Linear(into, out), nn.ReLU(), nn.Dropout(dropout)])
            into = out
        self.classifier.append(nn.Linear(into, classes))

    def forward(self, x: Tensor) -> Tensor:
        """Logits (batch, classes) for images (batch, channels, height, width)."""
        # Faster on CPU, as in `resnet.py`.
        x = x.clone(memory_format=torch.channels_last)
        logits: Tensor = self.classifier(self.avgpool(self.features(x)).flatten(1))
        return logits
