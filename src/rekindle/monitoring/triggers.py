"""When a method is applied: triggers that read metrics and return the reason why they fire.

A trigger is called once per step with a mapping of metrics (a Health's `flat()`, a training loop's own numbers, or
both) and returns the reason, or None. A metric that is not there was not measured and fires nothing. Names are
those of `Health.flat()`, with or without the prefix "health/" that a monitor's sinks show.

>>> trigger = DormancyAbove(0.5)
>>> [trigger({"dormant": share}) for share in (0.1, 0.7)]
[None, 'dormant 0.7 > 0.5']
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol, Self, runtime_checkable

from rekindle.diagnosis.verdict import LEVELS

Metrics = Mapping[str, Any]
PREFIX = "health/"  # what a Monitor's sinks put before the names
# Metrics that only a Health has.
HEALTH = frozenset({"dormant", "dormant_worst", "dead_worst", "feature_rank_worst", "dfi_scale_free", "verdict"})


@runtime_checkable
class Flat(Protocol):
    """A Health or a monitor's Sample: its numbers as one flat dict."""

    def flat(self) -> dict[str, float]:
        """The numbers by name."""
        ...


class Trigger(ABC):
    """Says when. `cooldown` steps must pass between two firings, and `most` caps their number.

    A subclass implements `look`, which may keep its own state, and resets that state in `commit`, which is called
    only if the trigger as a whole fired. `state_dict` holds its attributes that are named in `_kept`.
    """

    _kept: tuple[str, ...] = ()
    _given: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: object, **options: object) -> Self:  # noqa: D102
        made = super().__new__(cls)
        made._given = args, options
        return made

    def __init__(self, *, cooldown: int = 0, most: int | None = None) -> None:
        if cooldown < 0:
            raise ValueError(f"cooldown is a number of steps, got {cooldown}")
        if most is not None and most < 0:
            raise ValueError(f"most is a number of firings, got {most}")
        self.cooldown, self.most = cooldown, most
        self.step, self.firings = 0, 0
        self._last: int | None = None

    def __repr__(self) -> str:
        """As it was written.

        >>> DormancyAbove(0.5, cooldown=10)
        DormancyAbove(0.5, cooldown=10)
        """
        args, options = self._given
        written = [*map(repr, args), *(f"{name}={value!r}" for name, value in options.items())]
        return f"{type(self).__name__}({', '.join(written)})"

    def __call__(self, metrics: Metrics | Flat) -> str | None:
        """One step: the reason if it fires, else None."""
        reason = self.consider(flat(metrics))
        if reason is not None:
            self.fire()
        return reason

    def consider(self, metrics: Metrics) -> str | None:
        """One step without firing: called by a trigger that contains this one."""
        self.step += 1
        reason = self.look(metrics)
        rested = self._last is None or self.step - self._last > self.cooldown
        return reason if rested and (self.most is None or self.firings < self.most) else None

    def fire(self) -> None:
        """The reason given at this step was followed."""
        self.firings += 1
        self._last = self.step
        self.commit()

    @abstractmethod
    def look(self, metrics: Metrics) -> str | None:
        """The reason to fire now, or None."""

    def reads(self) -> list[tuple[str, ...]]:
        """The metrics that it needs to fire; names of which one is enough are grouped."""
        return []

    def commit(self) -> None:
        """Start anew after a firing; most triggers have nothing to do."""
        return

    def state_dict(self) -> dict[str, Any]:
        """What must be saved to go on later.

        >>> every = Every(2)
        >>> every({}), every.state_dict()["step"]
        (None, 1)
        """
        kept = {name: getattr(self, name) for name in self._kept}
        return {"step": self.step, "firings": self.firings, "last": self._last, **kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        missing = {"step", "firings", "last", *self._kept} - state.keys()
        if missing:
            raise ValueError(f"this is not the state of {type(self).__name__}: {sorted(missing)} missing")
        self.step, self.firings, self._last = state["step"], state["firings"], state["last"]
        for name in self._kept:
            setattr(self, name, state[name])


class AtBoundary(Trigger):
    """Where a task ends: `metrics["boundary"]` is true, or `metrics["task"]` differs from the step before.

    >>> trigger = AtBoundary()
    >>> [trigger({"task": task}) for task in (0, 0, 1)]
    [None, None, 'task 0 → 1']
    """

    _kept = ("task",)

    def __init__(self, *, cooldown: int = 0, most: int | None = None) -> None:
        super().__init__(cooldown=cooldown, most=most)
        self.task: object = None

    def reads(self) -> list[tuple[str, ...]]:
        """Either of the two."""
        return [("task", "boundary")]

    def look(self, metrics: Metrics) -> str | None:
        """True boundary, or another task than before."""
        before, self.task = self.task, metrics.get("task", self.task)
        if metrics.get("boundary"):
            return "task boundary"
        return f"task {before} → {self.task}" if before is not None and self.task != before else None


class Every(Trigger):
    """Every `n` steps.

    >>> trigger = Every(2)
    >>> [trigger({}) for _ in range(4)]
    [None, 'every 2 steps', None, 'every 2 steps']
    """

    def __init__(self, n: int, *, cooldown: int = 0, most: int | None = None) -> None:
        super().__init__(cooldown=cooldown, most=most)
        if n < 1:
            raise ValueError(f"n is a positive number of steps, got {n}")
        self.n = n

    def look(self, metrics: Metrics) -> str | None:
        """Whether the step count is a multiple of n."""
        return f"every {self.n} steps" if self.step % self.n == 0 else None


class Plateau(Trigger):
    """No improvement of `key` by more than `min_delta` over `patience` looks at it; counts anew after a firing.

    >>> trigger = Plateau(patience=2)
    >>> [trigger({"loss": loss}) for loss in (3.0, 2.0, 2.5, 2.0)]
    [None, None, None, 'loss not below 2 for 2 looks']
    """

    _kept = ("best", "waited")

    def __init__(
        self,
        patience: int,
        min_delta: float = 0.0,
        *,
        key: str = "loss",
        higher_is_better: bool = False,
        cooldown: int = 0,
        most: int | None = None,
    ) -> None:
        super().__init__(cooldown=cooldown, most=most)
        if isinstance(patience, str) or patience < 1:
            raise ValueError(f"patience is a positive number of looks, got {patience!r}; a metric's name is key=")
        if min_delta < 0:
            raise ValueError(f"min_delta cannot be negative, got {min_delta}")
        self.patience, self.min_delta, self.key, self.higher_is_better = patience, min_delta, key, higher_is_better
        self.best: float | None = None
        self.waited = 0

    def reads(self) -> list[tuple[str, ...]]:
        """Its key."""
        return [(self.key,)]

    def look(self, metrics: Metrics) -> str | None:
        """Count looks since the best value."""
        value = _number(metrics, self.key)
        if value is None:
            return None
        gain = math.inf if self.best is None else (value - self.best) * (1 if self.higher_is_better else -1)
        # NaN is no improvement.
        if gain > self.min_delta and not math.isnan(value):
            self.best, self.waited = value, 0
            return None
        self.waited += 1
        if self.waited < self.patience:
            return None
        where = "above" if self.higher_is_better else "below"
        best = "any number" if self.best is None else f"{self.best:g}"
        return f"{self.key} not {where} {best} for {self.waited} looks"

    def commit(self) -> None:
        """Forget the best value: the model that reached it is gone."""
        self.best, self.waited = None, 0


class _Threshold(Trigger):
    """One metric against one number."""

    above = True

    def __init__(self, threshold: float, *, key: str, cooldown: int = 0, most: int | None = None) -> None:
        super().__init__(cooldown=cooldown, most=most)
        self.threshold, self.key = threshold, key

    def reads(self) -> list[tuple[str, ...]]:
        """Its key."""
        return [(self.key,)]

    def look(self, metrics: Metrics) -> str | None:
        """Whether the metric is past the threshold."""
        value = _number(metrics, self.key)
        if value is None or not (value > self.threshold if self.above else value < self.threshold):
            return None
        return f"{self.key} {value:g} {'>' if self.above else '<'} {self.threshold:g}"


class DormancyAbove(_Threshold):
    """More than this share of the worst layer's units is dormant, the number that a verdict names too.

    key="dormant" is the share of all units. Metrics that have only that number are judged by it.

    >>> DormancyAbove(0.3)({"dormant_worst": 0.4, "dormant": 0.1})
    'dormant_worst 0.4 > 0.3'
    """

    def __init__(self, share: float, *, key: str = "dormant_worst", cooldown: int = 0, most: int | None = None) -> None:
        super().__init__(_share(share, key), key=key, cooldown=cooldown, most=most)

    def reads(self) -> list[tuple[str, ...]]:
        """The worst layer's share, or that of all units."""
        return [(self.key, "dormant") if self.key == "dormant_worst" else (self.key,)]

    def look(self, metrics: Metrics) -> str | None:
        """The worst layer where it is known."""
        if self.key == "dormant_worst" and name_in(metrics, self.key) is None:
            value = _number(metrics, "dormant")
            return None if value is None or not value > self.threshold else f"dormant {value:g} > {self.threshold:g}"
        return super().look(metrics)


class DeadAbove(_Threshold):
    """More than this share of the units of one kind in one place is dead: neurons, experts, codes, latents or ranks.

    >>> DeadAbove(0.1)({"dead_worst": 0.875})
    'dead_worst 0.875 > 0.1'
    """

    def __init__(self, share: float, *, key: str = "dead_worst", cooldown: int = 0, most: int | None = None) -> None:
        super().__init__(_share(share, key), key=key, cooldown=cooldown, most=most)


class RankBelow(_Threshold):
    """The lowest feature rank, as a share of what is possible, is below this.

    >>> RankBelow(0.1)({"feature_rank_worst": 0.02})
    'feature_rank_worst 0.02 < 0.1'
    """

    above = False

    def __init__(
        self, share: float, *, key: str = "feature_rank_worst", cooldown: int = 0, most: int | None = None
    ) -> None:
        super().__init__(_share(share, key), key=key, cooldown=cooldown, most=most)


class DfIAbove(_Threshold):
    """The mean scale-free deviation from isometry per dimension is above this (a Gaussian square matrix has 1).

    >>> DfIAbove(5)({"dfi_scale_free": 8.0})
    'dfi_scale_free 8 > 5'
    """

    def __init__(
        self, value: float, *, key: str = "dfi_scale_free", cooldown: int = 0, most: int | None = None
    ) -> None:
        super().__init__(value, key=key, cooldown=cooldown, most=most)


class GradientVanished(_Threshold):
    """The norm of the whole gradient is below this.

    >>> GradientVanished(1e-6)({"gradient_norm": 0.0})
    'gradient_norm 0 < 1e-06'
    """

    above = False

    def __init__(
        self, norm: float = 1e-6, *, key: str = "gradient_norm", cooldown: int = 0, most: int | None = None
    ) -> None:
        super().__init__(norm, key=key, cooldown=cooldown, most=most)


class VerdictIs(Trigger):
    """The verdict of a Health is at least this.

    >>> VerdictIs("act")({"verdict": 2.0})
    'verdict act'
    """

    def __init__(self, level: str = "act", *, cooldown: int = 0, most: int | None = None) -> None:
        super().__init__(cooldown=cooldown, most=most)
        if level not in LEVELS:
            raise ValueError(f"level is one of {LEVELS}, got {level!r}")
        self.level = level

    def reads(self) -> list[tuple[str, ...]]:
        """The verdict's number."""
        return [("verdict",)]

    def look(self, metrics: Metrics) -> str | None:
        """Compare the level's number."""
        value = _number(metrics, "verdict")
        if value is None or not value >= LEVELS.index(self.level):
            return None
        return f"verdict {LEVELS[int(value)]}"


def flat(metrics: Metrics | Flat) -> Metrics:
    """Metrics as a flat mapping, whatever they came as.

    >>> flat({"loss": 1.0})
    {'loss': 1.0}
    """
    if isinstance(metrics, Mapping):
        return metrics
    if isinstance(metrics, Flat):
        return metrics.flat()
    raise TypeError(
        f"metrics is a dict, a Health, a Sample or (for a Schedule) a Monitor, got {type(metrics).__name__}"
    )


def name_in(metrics: Metrics, key: str) -> str | None:
    """The name under which a metric is there: its own, or that with or without the sinks' prefix "health/".

    >>> name_in({"health/dormant": 0.1}, "dormant"), name_in({"dormant": 0.1}, "health/dormant")
    ('health/dormant', 'dormant')
    """
    return next((name for name in (key, PREFIX + key, key.removeprefix(PREFIX)) if name in metrics), None)


def _share(share: float, key: str) -> float:
    if key.removeprefix(PREFIX) in HEALTH and not 0 <= share <= 1:
        raise ValueError(f"a share is a number from 0 to 1, got {share:g}: 50% is 0.5")
    return share


def _number(metrics: Metrics, key: str) -> float | None:
    name = name_in(metrics, key)
    value = None if name is None else metrics[name]
    return None if value is None else float(value)
