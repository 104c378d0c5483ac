"""Two arms held against each other in everything that is measured, setting by setting, paired by seed.

Whether one is better is said after Holm's correction over the measures of a setting; the intervals are plain ones.
The question "does it matter that FIRE's isometry is the nearest one?" is this, with FIRE and a random isometry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from rekindle.lab import metrics
from rekindle.lab.comparing import NOTHING, Contender, Rows, recoveries
from rekindle.lab.results import Results
from rekindle.lab.settings import Setting
from rekindle.lab.statistics import Difference, holm, paired
from rekindle.lab.wording import Measure, measure


@dataclass(frozen=True)
class Pair:
    """One measure of one setting: arm − other over the seeds that both have."""

    setting: str
    what: str
    measured: Measure
    difference: Difference

    def cells(self) -> tuple[str, str, str, str]:
        """Setting, measure, difference with its interval, and who is better: "–" where it may be chance."""
        found = self.difference
        sides = self.measured.differences(found.low, found.high)
        sure = found.holm is not None and found.holm < 0.05
        gain = (found.mean > 0) == self.measured.higher
        shown = f"{self.measured.difference(found.mean)} {sides}".strip()
        return (
            self.setting,
            f"{self.what}, {self.measured.step}",
            shown,
            ("better" if gain else "worse") if sure else "–",
        )


def compared(studies: Iterable[Results], arm: str, other: str) -> list[Pair]:
    """Every measure of every setting that has finished runs of both arms, with Holm's p over those of a setting."""
    found: list[Pair] = []
    for results in studies:
        for name, setting in results.settings.items():
            arms = {each.name: each for each in results.contenders(name)}
            if arm in arms and other in arms:
                found += with_holm(_setting(setting, arms[arm], arms[other], arms.get(NOTHING)))
    return found


def with_holm(pairs: Sequence[Pair]) -> list[Pair]:
    """The same with Holm's p over all of them."""
    corrected = holm({str(place): pair.difference.p for place, pair in enumerate(pairs)})
    return [
        replace(pair, difference=replace(pair.difference, holm=corrected[str(place)]))
        for place, pair in enumerate(pairs)
    ]


def table(pairs: Iterable[Pair]) -> list[str]:
    """The lines of a Markdown table.

    >>> table([])[0]
    '| setting | measure | difference, 95 % interval | |'
    """
    lines = ["| setting | measure | difference, 95 % interval | |", "|---|---|---|---|"]
    return [*lines, *("| " + " | ".join(pair.cells()) + " |" for pair in pairs)]


def _setting(setting: Setting, arm: Contender, other: Contender, nothing: Contender | None) -> list[Pair]:
    old = measure("old_loss" if setting.falling else "old_accuracy")
    cost = Measure(old.name, old.unit, old.times, higher=False)
    asked: list[tuple[str, Measure, Callable[[Rows], float | None]]] = [
        ("headline", measure(setting.headline), lambda rows: metrics.headline(rows, setting)),
        ("old tasks right after the remedy", old, lambda rows: metrics.retention_after_remedy(rows, setting)),
        ("old tasks at the end", old, lambda rows: metrics.retention(rows, setting)),
        ("drop of the task just learned", cost, lambda rows: metrics.drop(rows, setting)),
        ("change of the function (KL)", measure("function_drift"), metrics.drift),
    ]
    values = [(what, measured, _by_seed(arm, number), _by_seed(other, number)) for what, measured, number in asked]
    if nothing is not None:
        steps = Measure("steps", "steps", higher=False)
        ours, theirs = recoveries(arm, nothing), recoveries(other, nothing)
        values.append(("until learned as well as by doing nothing", steps, ours, theirs))
    found = []
    for what, measured, ours, theirs in values:
        difference = paired(ours, theirs)
        if difference is not None:
            found.append(Pair(setting.name, what, measured, difference))
    return found


def _by_seed(each: Contender, number: Callable[[Rows], float | None]) -> dict[int, float]:
    return {seed: value for seed, rows in each.runs.items() if (value := number(rows)) is not None}
