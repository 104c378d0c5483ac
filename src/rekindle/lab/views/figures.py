"""Which pictures a study has: curves of the headline, differences, retention, health, and views over all streams."""

from __future__ import annotations

import math

from rekindle.lab.results.comparison import FIRE, NOTHING, ArmComparison
from rekindle.lab.results.statistics import SEEDS_FOR_INTERVAL
from rekindle.lab.results.wording import measure
from rekindle.lab.settings import RETURNS
from rekindle.lab.views.plots import Line, Whisker, curves, forest
from rekindle.lab.views.svg import COLORS, Picture

_KNOWN_FIRST = (FIRE, NOTHING, "full-reset")
_HEALTH = ("dormant", "effective_rank", "dfi", "norm")
_FITTING, _GENERALISING = "online_accuracy", "test_accuracy"


def shown_arms(comparison: ArmComparison) -> list[str]:
    """The arms that get a color: FIRE, nothing and the full reset, then the best of the others."""
    first = [arm for arm in _KNOWN_FIRST if arm in comparison.values]
    rest = [arm for arm in comparison.ranked if arm not in first]
    chosen = [*first, *rest[: COLORS - len(_KNOWN_FIRST)]]
    # In the order of the study, so that a color does not change with the result where all arms have one.
    order = [arm for arm in comparison.values if arm in chosen]
    return [arm for arm in _KNOWN_FIRST if arm in order] + [arm for arm in order if arm not in _KNOWN_FIRST]


def learning(comparison: ArmComparison) -> list[Picture]:
    """The headline over the tasks, and the test measure beside it where there is one."""
    drawn = []
    key = comparison.setting.headline
    other = {"online_accuracy": "test_accuracy", "online_loss": "test_loss"}.get(key)
    for each in (key, other):
        if each is None:
            continue
        measured = measure(each)
        lines = _lines(comparison, each)
        if not lines or (each != key and key.startswith("online") and _meaningless(comparison, each)):
            continue
        classes = comparison.classes
        level = (100.0 / classes, "chance") if measured.unit == "%" and isinstance(classes, int) and classes else None
        drawn.append(
            curves(
                f"{measured.name.capitalize()} on each task",
                lines,
                x="task",
                y=measured.axis,
                named=shown_arms(comparison),
                level=level,
                start=0.0 if measured.unit == "%" else None,
                note=_bands(comparison),
            )
        )
    return drawn


def differences(comparison: ArmComparison) -> list[Picture]:
    """Each arm minus doing nothing, and FIRE minus the references."""
    measured = comparison.headline
    against = [
        _interval(comparison, arm, NOTHING, arm)
        for arm in comparison.ranked
        if arm != NOTHING and comparison.against(arm, NOTHING) is not None
    ]
    if not against:
        return []
    better, worse = ("better", "worse") if measured.higher else ("worse", "better")
    return [
        forest(
            f"{measured.name.capitalize()}: each arm minus doing nothing, paired by seed",
            [each for each in against if each is not None],
            x=f"difference, {measured.step}" if measured.step else "difference",
            better=better,
            worse=worse,
            named=shown_arms(comparison),
        )
    ]


def retention(comparison: ArmComparison) -> list[Picture]:
    """What is left of earlier tasks right after the remedy, and at the end of each task."""
    measured = measure("old_accuracy" if comparison.headline.unit == "%" else "old_loss")
    key = "old_accuracy" if comparison.headline.unit == "%" else "old_loss"
    drawn = []
    for title, each in (
        ("when a task begins, right after the remedy", f"{key}_start"),
        ("when a task ends", key),
    ):
        lines = _lines(comparison, each)
        if lines:
            drawn.append(
                curves(
                    f"{measured.name.capitalize()}, {title}",
                    lines,
                    x="task",
                    y=measured.axis,
                    named=shown_arms(comparison),
                    size=(640, 300),
                )
            )
    return drawn


def health(comparison: ArmComparison) -> list[Picture]:
    """Measures of the network at the end of each task."""
    drawn = []
    for key in _HEALTH:
        measured = measure(key)
        lines = _lines(comparison, "health", key)
        if lines:
            name = measured.name[0].upper() + measured.name[1:]
            drawn.append(
                curves(name, lines, x="task", y=measured.axis, named=shown_arms(comparison), start=0.0, size=(640, 280))
            )
    return drawn


def _lines(comparison: ArmComparison, *keys: str) -> list[Line]:
    """Curves of a measure in its unit; a band ends where the measure does, whatever few seeds make of its interval."""
    measured = measure(keys[-1].removesuffix("_start"))
    bottom = -math.inf if keys[-1] in RETURNS else 0.0
    top = 100.0 if measured.unit == "%" else math.inf
    found = []
    for arm in comparison.arms:
        curve = comparison.curve(arm, *keys)
        if curve is not None:
            mean, low, high = (
                [None if value is None else measured.times * value for value in curve[end]]
                for end in ("mean", "low", "high")
            )
            places = range(1, len(mean) + 1)
            ends = ([_within(value, bottom, top) for value in end] for end in (low, high))
            found.append(Line(arm, places, mean, *ends))
    return found


def _within(value: float | None, bottom: float, top: float) -> float | None:
    return None if value is None else min(max(value, bottom), top)


def _interval(comparison: ArmComparison, arm: str, reference: str, label: str) -> Whisker | None:
    difference = comparison.against(arm, reference)
    if difference is None:
        return None
    times = comparison.headline.times
    low, high = (None if end is None else times * end for end in (difference.low, difference.high))
    return Whisker(label, times * difference.mean, low, high)


def _ends(low: float | None, high: float | None) -> tuple[float, float] | None:
    return None if low is None or high is None else (100 * low, 100 * high)


def _meaningless(comparison: ArmComparison, key: str) -> bool:
    """Test accuracy of random labels is chance by construction: no picture."""
    return "random" in comparison.setting.stream


def _bands(comparison: ArmComparison) -> str:
    count = len(comparison.seeds)
    if count < SEEDS_FOR_INTERVAL:
        return f"{'One seed' if count == 1 else 'Two seeds'}: no intervals."
    return f"Mean over {count} seeds with its 95 % interval."
