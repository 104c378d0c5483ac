"""What happened at every step of a task, kept without ever waiting for a number inside the loop."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from rekindle.lab.evaluation import finite

POINTS = 20  # of a curve
PEAK = 20  # steps in which a spike is looked for


class Track:
    """Right answers and loss of every step; sums are taken when somebody asks.

    >>> track = Track()
    >>> for right, loss in ((0, 2.0), (1, 1.0), (2, 0.5), (2, 0.5)):
    ...     track.add(torch.tensor(right), torch.tensor(loss), 2)
    >>> track.accuracy, track.loss, track.curve(points=2)
    (0.625, 1.0, [[2, 0.25, 1.5], [4, 1.0, 0.5]])
    """

    def __init__(self) -> None:
        self._right: list[Tensor] = []
        self._loss: list[Tensor] = []
        self._count: list[int] = []
        self._known = 0  # steps whose loss has been looked at
        self._sums: tuple[Tensor, Tensor, Tensor] | None = None

    def __len__(self) -> int:
        return len(self._count)

    def add(self, right: Tensor, loss: Tensor, count: int) -> None:
        """One step: how many of `count` answers were right, and the mean loss, both as tensors."""
        self._right.append(right)
        self._loss.append(loss)
        self._count.append(count)

    def diverged(self) -> bool:
        """Whether a loss since the last time this was asked is not finite."""
        new = self._loss[self._known :]
        self._known = len(self._loss)
        return bool(new) and not bool(torch.stack(new).isfinite().all())

    @property
    def accuracy(self) -> float | None:
        """The share of right answers while learning."""
        return self._mean(0, 0, len(self)) if len(self) else None

    @property
    def loss(self) -> float | None:
        """The mean loss while learning."""
        return self._mean(1, 0, len(self)) if len(self) else None

    def curve(self, points: int = POINTS) -> list[list[float | None]]:
        """At most `points` times [step, accuracy, loss], each over the steps since the one before."""
        edges = sorted({round(i * len(self) / points) for i in range(points + 1)})
        return [[last, self._mean(0, first, last), self._mean(1, first, last)] for first, last in pairwise(edges)]

    def peak(self, first: int = PEAK) -> float | None:
        """The highest loss among the first steps: the spike that a remedy may leave behind, averages hide it."""
        return finite(float(torch.stack(self._loss[:first]).max())) if len(self) else None

    def _cumulative(self) -> tuple[Tensor, Tensor, Tensor]:
        """Running sums of right answers, losses and counts, with a zero in front."""
        if self._sums is None or len(self._sums[0]) != len(self) + 1:
            count = torch.tensor(self._count, dtype=torch.double)
            right = torch.stack(self._right).double()
            loss = torch.stack(self._loss).double() * count
            zero = torch.zeros(1, dtype=torch.double)
            self._sums = (
                torch.cat([zero, right.cumsum(0)]),
                torch.cat([zero, loss.cumsum(0)]),
                torch.cat([zero, count.cumsum(0)]),
            )
        return self._sums

    def _mean(self, column: int, first: int, last: int) -> float | None:
        sums = self._cumulative()
        return finite(float((sums[column][last] - sums[column][first]) / (sums[2][last] - sums[2][first])))
