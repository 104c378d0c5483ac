"""The statistics of one layer's units: running sums over batches, and the numbers they give.

>>> import torch
>>> scores(torch.tensor([3.0, 1.0, 0.0, 0.0]))
tensor([3., 1., 0., 0.])
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rekindle.diagnosis.hooks import Activated
from rekindle.engine.devices import to_float64
from rekindle.measures.spectra import effective_rank, gram, participation_rank, roots, srank

# A unit counts as active on a row where |a| is above this share of the layer's mean |a| in the batch.
ACTIVE_SHARE = 0.01
# A bounded activation is saturated within this share of its range from a bound.
SATURATED_SHARE = 0.01
# A unit is linearized where a straight line explains all but this share of its output's variance.
LINEAR_REST = 1e-4
# Fewer rows than this cannot show that a unit is linear or constant.
FEWEST_ROWS = 8


@dataclass(frozen=True, eq=False)
class UnitActivity:
    """What the units of one layer did. None is unmeasured; counts are of units, usage and ranks as documented.

    `usage` is the mean share of rows on which a unit is active, `usage_gini` 0 for equal use and near 1 where
    few units do all the work, `usage_entropy` the entropy of the use as a share of its maximum.
    `feature_rank` is Roy and Vetterli's effective rank of the rows × units matrix, `feature_srank` Kumar's at
    δ = 0.01, `feature_participation` the participation rank; `rank_limit` is what any of them can be at most.
    `linearized` units follow a straight line on all rows, `constant` ones give the same non-zero value on all.

    >>> from rekindle.diagnosis.activity import activity
    >>> layer = activity(torch.nn.Sigmoid(), [torch.tensor([[0.0, 99.0]]).expand(8, 2)]).layers[0]
    >>> layer.saturation, layer.constant
    (0.5, 2)
    """

    name: str
    kind: str
    after: str
    units: int
    rows: int
    scores: Tensor
    finite: bool
    usage: float
    usage_gini: float | None
    usage_entropy: float | None
    rank_limit: int
    feature_rank: float | None = None
    feature_srank: int | None = None
    feature_participation: float | None = None
    saturation: float | None = None
    linearized: int | None = None
    constant: int | None = None
    gradient_scores: Tensor | None = None

    @property
    def dead(self) -> int:
        """Units that gave exactly 0 on every row."""
        return int((self.scores <= 0).sum())

    def dormant(self, tau: float = 0.025) -> float:
        """Share of units whose score is at most τ."""
        return float((self.scores <= tau).double().mean())

    def gradient_dormant(self, tau: float = 0.025) -> float | None:
        """Share of units whose mean |∂L/∂a| is at most τ of the layer's mean; None without gradients."""
        return None if self.gradient_scores is None else float((self.gradient_scores <= tau).double().mean())

    def summary(self, tau: float = 0.025) -> dict[str, float]:
        """The measured numbers by name."""
        numbers: dict[str, Any] = {"dormant": self.dormant(tau), "dead": self.dead / self.units}
        for name in ("usage", "usage_gini", "usage_entropy", "saturation", "feature_rank", "feature_srank"):
            numbers[name] = getattr(self, name)
        numbers["feature_participation"] = self.feature_participation
        numbers["linearized"] = None if self.linearized is None else self.linearized / self.units
        numbers["constant"] = None if self.constant is None else self.constant / self.units
        numbers["gradient_dormant"] = self.gradient_dormant(tau)
        return {name: float(value) for name, value in numbers.items() if value is not None}

    def to_dict(self) -> dict[str, Any]:
        """Plain values; what was not measured is left out."""
        known = {"name": self.name, "kind": self.kind, "after": self.after, "units": self.units, "rows": self.rows}
        return {**known, "finite": self.finite, "rank_limit": self.rank_limit, **self.summary()}


def scores(mean_abs: Tensor) -> Tensor:
    """Mean |a| per unit over the layer's mean; all 0 where the whole layer is inactive.

    >>> scores(torch.zeros(2))
    tensor([0., 0.])
    """
    mean = mean_abs.mean()
    return mean_abs / mean if mean != 0 else torch.zeros_like(mean_abs)


def gini(use: Tensor) -> float | None:
    """Gini coefficient of non-negative numbers, None where all are 0.

    >>> gini(torch.ones(4)), gini(torch.tensor([0.0, 0.0, 0.0, 1.0]))
    (0.0, 0.75)
    """
    ordered = np.sort(use.cpu().numpy())
    total, n = float(ordered.sum(dtype=np.float64)), use.numel()
    if total <= 0:
        return None
    return float(2 * (np.arange(1, n + 1) @ ordered) / (n * total) - (n + 1) / n)


def usage_entropy(use: Tensor) -> float | None:
    """Entropy of the use as a share of log n; None where nothing is used or there is one unit.

    >>> usage_entropy(torch.ones(4))
    1.0
    """
    use, n = to_float64(use), use.numel()
    total = float(use.sum())
    if total <= 0 or n < 2:
        return None
    return float(torch.special.entr(use / total).sum()) / math.log(n)


def rows_of(values: Tensor, unit_dim: int, mask: Tensor | None = None) -> Tensor | None:
    """(rows, units) of an activation of any rank, padded tokens left out; None if it has no elements of a row.

    >>> rows_of(torch.zeros(2, 3, 4, 4), unit_dim=1).shape
    torch.Size([32, 3])
    >>> rows_of(torch.zeros(2, 5, 3), -1, torch.tensor([[1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]).bool()).shape
    torch.Size([6, 3])
    """
    if values.dim() == 0 or not values.is_floating_point():
        return None
    values = values.detach()
    units = values.movedim(unit_dim, -1)
    leading = units.shape[:-1]
    units = units.reshape(-1, units.shape[-1])
    if mask is not None:
        if leading[:2] == mask.shape and len(leading) == 2:
            units = units[mask.reshape(-1).to(units.device)]
        elif len(leading) == 2 and leading == (mask.shape[1], mask.shape[0]):
            units = units[mask.mT.reshape(-1).to(units.device)]
        elif len(leading) == 1 and leading[0] == mask.numel():
            units = units[mask.reshape(-1).to(units.device)]
    return units if units.dtype in (torch.float32, torch.float64) else units.float()


@dataclass(eq=False)
class UnitSums:
    """Sums over rows from which every number of a layer follows."""

    kind: str
    after: str
    units: int
    rows: int
    absolute: Tensor
    active: Tensor
    kept: Tensor
    full: bool
    saturated: Tensor | None
    moments: Tensor | None
    gradient: Tensor | None = None

    @classmethod
    def of(cls, event: Activated, values: Tensor, pre: Tensor | None, *, full: bool, keep: int) -> UnitSums:
        """The sums of one call."""
        absolute = values.abs()
        sums = absolute.sum(0)
        threshold = ACTIVE_SHARE * sums.mean() / len(values)
        saturated = None
        if event.bounds is not None:
            low, high = event.bounds
            margin = SATURATED_SHARE * (high - low if low is not None and high is not None else high or 1.0)
            near = torch.zeros_like(values, dtype=torch.bool)
            if high is not None:
                near |= values >= high - margin
            if low is not None:
                near |= values <= low + margin
            saturated = near.float().mean() * len(values)
        return cls(
            kind=event.kind,
            after=event.after,
            units=values.shape[1],
            rows=len(values),
            absolute=sums,
            active=(absolute > threshold).sum(0),
            # A copy: an operation in place would otherwise change what was kept.
            kept=values[:: max(1, len(values) // keep) if keep else 1][:keep].clone(),
            full=full,
            saturated=saturated,
            moments=_moments(values, pre) if full else None,
        )

    def add(self, other: UnitSums, keep: int) -> None:
        """Join another batch's sums."""
        self.rows += other.rows
        self.absolute = self.absolute + other.absolute
        self.active = self.active + other.active
        if len(self.kept) < keep:
            self.kept = torch.cat([self.kept, other.kept[: keep - len(self.kept)]])
        self.saturated = _plus(self.saturated, other.saturated)
        self.moments = _plus(self.moments, other.moments)
        self.gradient = _plus(self.gradient, other.gradient)

    def add_gradient(self, gradient: Tensor) -> None:
        """Join ∂L/∂a of some rows."""
        found = gradient.abs().sum(0)
        self.gradient = found if self.gradient is None else self.gradient + found

    def result(self, name: str) -> UnitActivity:
        """The numbers."""
        finite = math.isfinite(self.absolute.sum()) and bool(torch.isfinite(self.kept).all())
        # One transfer from the device; the small operations below are faster on the host.
        size, frequency = torch.stack([self.absolute, self.active.to(self.absolute)]).cpu().double() / self.rows
        limit = min(self.kept.shape)
        participation = effective = small = None
        if finite and limit:
            spectrum = roots(torch.linalg.eigvalsh(gram(to_float64(self.kept))))
            effective, small = float(effective_rank(spectrum)), int(srank(spectrum))
            participation = float(participation_rank(spectrum)) if effective else 0.0
        linearized, constant = self._shape_of_response()
        return UnitActivity(
            name=name,
            kind=self.kind,
            after=self.after,
            units=self.units,
            rows=self.rows,
            scores=scores(size).to(self.absolute.dtype),
            finite=finite,
            usage=float(frequency.mean()),
            usage_gini=gini(frequency),
            usage_entropy=usage_entropy(frequency),
            rank_limit=limit,
            feature_participation=participation,
            feature_rank=effective,
            feature_srank=small,
            saturation=None if self.saturated is None else float(self.saturated) / self.rows,
            linearized=linearized,
            constant=constant,
            gradient_scores=None if self.gradient is None else scores(self.gradient).cpu(),
        )

    def _shape_of_response(self) -> tuple[int | None, int | None]:
        if self.moments is None or self.rows < FEWEST_ROWS:
            return None, None
        mean = self.moments / self.rows
        y, yy = mean[0], mean[1]
        variance = yy - y.square()
        moves = variance > 1e-10 * yy
        constant = int((~moves & (yy > 0)).sum())
        if len(mean) == 2:
            return None, constant
        x, xx, xy = mean[2], mean[3], mean[4]
        input_variance, together = xx - x.square(), xy - x * y
        rest = variance - together.square() / input_variance.clamp_min(1e-300)
        straight = moves & (input_variance > 1e-10 * xx) & (rest <= LINEAR_REST * variance)
        return int(straight.sum()), constant


def _moments(values: Tensor, pre: Tensor | None) -> Tensor:
    y = to_float64(values)
    found = [y.sum(0), y.square().sum(0)]
    if pre is not None:
        x = to_float64(pre)
        found += [x.sum(0), x.square().sum(0), (x * y).sum(0)]
    return torch.stack(found)


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None or a.shape != b.shape else a + b
