"""What is measured of a run: every step of a task, what the network can do afterwards, and its health."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from rekindle import health
from rekindle.isolation import Batch
from rekindle.lab.sources import Examples

Numbers = dict[str, float | None]
HealthNumbers = dict[str, float | dict[str, Numbers] | None]
_AT_ONCE = 500  # rows per forward pass
POINTS = 20  # of a curve
PEAK = 20  # steps in which a spike is looked for


class Score(NamedTuple):
    """Accuracy and mean loss; a loss that is not finite is None."""

    accuracy: float | None
    loss: float | None


def score(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the network makes of x, its loss, and how many answers are right.

    The loss is cross entropy (text has one answer per token), or the network's own `loss(outputs, y)`. Where y is no
    class, nothing is right or wrong: NaN.
    """
    outputs = model(x)
    own = getattr(model, "loss", None)
    loss = cross_entropy(outputs.flatten(0, -2), y.flatten()) if own is None else own(outputs, y)
    right = outputs.new_tensor(math.nan) if y.is_floating_point() else (outputs.detach().argmax(-1) == y).sum()
    return outputs, loss, right


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of a batch."""
    return score(model, *batch)[1]


def finite(value: float) -> float | None:
    """The number, None where it is NaN or infinite: rows hold JSON."""
    return value if math.isfinite(value) else None


def mean(values: Iterable[float | None]) -> float | None:
    """The mean; None of nothing or where one is None."""
    known = list(values)
    present = [value for value in known if value is not None]
    return math.fsum(present) / len(present) if present and len(present) == len(known) else None


@torch.no_grad()
def evaluate(model: nn.Module, data: Examples) -> Score:
    """Accuracy and loss in evaluation mode."""
    right, loss, count = 0.0, 0.0, 0
    with evaluating(model):
        for x, y in zip(torch.split(data.x, _AT_ONCE), torch.split(data.y, _AT_ONCE), strict=True):
            _, found, hits = score(model, x, y)
            right += float(hits)
            loss += float(found) * y.numel()
            count += y.numel()
    return Score(finite(right / count), finite(loss / count))


def average(scores: Sequence[Score]) -> tuple[float | None, float | None]:
    """Mean accuracy and mean loss."""
    return mean(score.accuracy for score in scores), mean(score.loss for score in scores)


@torch.no_grad()
def log_probabilities(model: nn.Module, x: Tensor) -> Tensor:
    """The network's log probabilities, (…, classes)."""
    with evaluating(model):
        return torch.cat([model(part).log_softmax(-1) for part in torch.split(x, _AT_ONCE)])


def drift_of(before: Tensor, after: Tensor) -> float | None:
    """How far the function moved: the mean Kullback–Leibler divergence of new outputs from old ones."""
    moved = float((before.exp() * (before - after)).sum(-1).mean())
    return None if not math.isfinite(moved) else max(0.0, moved)  # rounding may leave it just below zero


def health_numbers(model: nn.Module, batch: Batch) -> HealthNumbers | None:
    """The health numbers that a study follows: shares of units, ranks and deviation, and the norm of all weights.

    `dormant` is the share of units whose activity is at most 0.025 of their layer's mean, `effective_rank` the mean
    over layers of feature rank ÷ what it could be, `dfi` the scale-free deviation from isometry per dimension.
    `units` holds what is known of experts, codes, latents and ranks, by kind, of the stack where most are dead.
    None is unmeasured.
    """
    try:
        report = health(model, [batch])
    except (ValueError, RuntimeError, TypeError):  # a diverged network, or one that activity cannot read
        return None
    units: dict[str, Numbers] = {}
    for name, numbers in sorted(report.stacks.items(), key=lambda item: item[1].get("dead", 0.0)):
        if (kind := report.about[name]["kind"]) != "rows":
            units[kind] = {key: _finite_or_none(value) for key, value in numbers.items()}
    ranks = [unit["feature_rank"] / unit["rank_limit"] for unit in report.units.values() if "feature_rank" in unit]
    return {
        "dormant": _finite_or_none(report.whole.get("dormant")),
        "dormant_worst": _finite_or_none(report.whole.get("dormant_worst")),
        "dead": _finite_or_none(report.whole.get("dead")),
        "effective_rank": mean(map(_finite_or_none, ranks)),
        "dfi": _finite_or_none(report.whole.get("dfi_scale_free")),
        "norm": _finite_or_none(report.whole.get("weight_norm")),
        **({"units": units} if units else {}),
    }


def _finite_or_none(value: float | None) -> float | None:
    return None if value is None else finite(value)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, and the mode of every module as it was afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


class Track:
    """Right answers and loss of every step of a task; sums are taken at the end, so that the loop never waits."""

    def __init__(self) -> None:
        self._right: list[Tensor] = []
        self._loss: list[Tensor] = []
        self._count: list[int] = []
        self._known = 0  # steps whose loss has been looked at
        self._sums: tuple[Tensor, Tensor, Tensor] | None = None

    @classmethod
    def filled(cls, right: Tensor, loss: Tensor, count: Sequence[int]) -> Track:
        """A track of steps that are over: a number per step each."""
        track = cls()
        track._right, track._loss, track._count = [right], [loss], list(count)
        return track

    def __len__(self) -> int:
        return len(self._count)

    def add(self, right: Tensor, loss: Tensor, count: int) -> None:
        """One step: how many of `count` answers were right, and the mean loss, both as tensors."""
        self._right.append(right)
        self._loss.append(loss)
        self._count.append(count)

    def diverged(self) -> bool:
        """Whether any loss since the last check is not finite."""
        new = self._loss[self._known :]
        self._known = len(self._loss)
        return bool(new) and not bool(_joined(new).isfinite().all())

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
        """The highest loss among the first steps: the spike that a remedy may cause, which averages hide."""
        return finite(float(_joined(self._loss[:first])[:first].max())) if len(self) else None

    def _cumulative(self) -> tuple[Tensor, Tensor, Tensor]:
        """Running sums of right answers, losses and counts, with a zero in front."""
        if self._sums is None or len(self._sums[0]) != len(self) + 1:
            count = torch.tensor(self._count, dtype=torch.double)
            right = _joined(self._right).double()
            loss = _joined(self._loss).double() * count
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


def _joined(numbers: Sequence[Tensor]) -> Tensor:
    """One number per step: they come one by one, or all at once."""
    return numbers[0] if len(numbers) == 1 and numbers[0].dim() else torch.stack(list(numbers))
