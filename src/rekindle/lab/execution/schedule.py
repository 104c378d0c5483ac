"""In which order runs are done, and how long it will take: what was measured before is expected again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any


@dataclass
class Expectation:
    """Seconds that a run should take, from runs like it: the same setting and arm, else the same setting.

    >>> known = Expectation()
    >>> known.learn("digits", "fire", 4.0); known.learn("digits", "nothing", 2.0)
    >>> known.seconds("digits", "fire"), known.seconds("digits", "redo"), known.seconds("other", "fire")
    (4.0, 3.0, None)
    """

    seen: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def learn(self, setting: str, arm: str, seconds: float) -> None:
        """Note how long a run took."""
        self.seen.setdefault((setting, arm), []).append(seconds)

    def seconds(self, setting: str, arm: str) -> float | None:
        """What to expect, or None while nothing like it was seen."""
        if (setting, arm) in self.seen:
            return fmean(self.seen[setting, arm])
        alike = [value for (name, _), values in self.seen.items() if name == setting for value in values]
        return fmean(alike) if alike else None


def work(setting: Any) -> float:
    """A rough size of a run from its options, to order settings that were never timed; the unit means nothing.

    >>> from types import SimpleNamespace as S
    >>> small, large = S(stream_options={"tasks": 2, "epochs": 3}), S(stream_options={"tasks": 20, "epochs": 3})
    >>> work(small) < work(large)
    True
    """
    options = {**setting.stream_options, **getattr(setting, "network_options", {})}
    size = 1.0
    for name, value in options.items():
        if name in SIZES and isinstance(value, int | float) and value > 0:
            size *= value
    return size


SIZES = frozenset({"tasks", "epochs", "steps", "count", "phases", "chunks", "width", "depth", "layers"})


def order(runs: Sequence[Any], known: Expectation) -> list[Any]:
    """Longest first, so that no long run is left alone at the end; seeds in turn, so that pairs are complete early.

    Settings that were never timed come before those that were: they may be long.
    """

    def key(place: int) -> tuple[float, float, int, int]:
        run = runs[place]
        seconds = known.seconds(run.setting.name, run.arm.name)
        return (-float("inf") if seconds is None else -_rounded(seconds), -work(run.setting), run.seed, place)

    return [runs[place] for place in sorted(range(len(runs)), key=key)]


def _rounded(seconds: float) -> float:
    """To a power of two: arms of about the same length should stay in the order of their seeds."""
    return float(2 ** round(max(seconds, 1e-3)).bit_length())


def start_group(run: Any) -> str:
    """Runs of one group may share the state after their first task, which the first of them makes."""
    return json.dumps(run.first_task(), sort_keys=True, default=list)


def choose(waiting: Sequence[Any], groups: Mapping[str, str], making: set[str]) -> Any:
    """The next run: the first one whose start is not in the making, else the first one.

    While a start is being made, another run of its group could only make it a second time.
    """
    return next((run for run in waiting if groups[run.identity] not in making), waiting[0])


@dataclass
class Clock:
    """How far one run is."""

    expected: float | None
    begun: float = field(default_factory=time.monotonic)
    share: float = 0.0

    def left(self) -> float | None:
        """Seconds that remain: by its own pace once a tenth is done, before that as expected."""
        spent = time.monotonic() - self.begun
        if self.share >= 0.1:
            return spent * (1.0 - self.share) / self.share
        if self.expected is None:
            return None
        return max(0.0, self.expected - spent)


def time_left(running: Iterable[Clock], waiting: Iterable[float | None], slots: int) -> float | None:
    """Seconds until the study is done, or None while there is nothing to judge by.

    >>> time_left([], [10.0, 10.0, 10.0, 10.0], 2)
    20.0
    """
    remaining = [clock.left() for clock in running]
    parts = [*remaining, *waiting]
    guess = [part for part in parts if part is not None]
    if not parts:
        return 0.0
    if not guess:
        return None
    total = sum(guess) + (len(parts) - len(guess)) * fmean(guess)
    return max(total / slots, *(part for part in remaining if part is not None), 0.0)
