"""Which pictures a study has: curves of the headline, differences, retention, health, and views over all streams."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rekindle.lab.results.comparison import FIRE, HEADS, NOTHING, ArmComparison, references
from rekindle.lab.results.statistics import SEEDS_FOR_INTERVAL
from rekindle.lab.results.wording import measure
from rekindle.lab.settings import RETURNS
from rekindle.lab.views.plots import Dot, Line, Whisker, curves, forest, scatter
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


def over_streams(found: Sequence[ArmComparison]) -> list[Picture]:
    """FIRE minus nothing, minus a full reset and minus a random isometry, a line per stream; wins to the right.

    Where the output layer was projected too, that is compared with the random isometry that touches it as well.

    Streams measure different things, so that each difference is a share of what the first task had.
    """
    lines = []
    with_heads = FIRE + HEADS
    pairs = [*((FIRE, reference) for reference in references(FIRE)), (with_heads, references(with_heads)[-1])]
    for arm, reference in pairs:
        name = "FIRE" if arm == FIRE else arm
        for comparison in found:
            difference, scale = comparison.against(arm, reference), _first(comparison)
            if difference is None or not scale:
                continue
            sign = 100.0 / scale * (1 if comparison.headline.higher else -1)
            ends = sorted(sign * end for end in (difference.low, difference.high) if end is not None)
            low, high = ends if len(ends) == 2 else (None, None)
            lines.append(
                Whisker(comparison.name, sign * difference.mean, low, high, f"{name} minus {reference}", reference)
            )
    if not lines:
        return []
    return [
        forest(
            "FIRE against its references, stream by stream",
            lines,
            x="paired difference, % of the first task's value; for losses the sign is turned",
            better="FIRE better",
            worse="FIRE worse",
            named=shown_arms(found[0]),
        )
    ]


def trade_off(found: Sequence[ArmComparison]) -> list[Picture]:
    """Fitting against generalising where both were measured on different streams: the scales of FIRE above all."""
    fitting = next((c for c in found if c.setting.headline == _FITTING), None)
    general = next((c for c in found if c.setting.headline == _GENERALISING), None)
    if fitting is None or general is None:
        return []
    both = [arm for arm in shown_arms(fitting) if arm in general.values]
    dots = []
    for arm in both:
        x, y = fitting.interval(arm), general.interval(arm)
        dots.append(Dot(arm, 100 * x.mean, 100 * y.mean, _ends(x.low, x.high), _ends(y.low, y.high)))
    if len(dots) < 2:
        return []
    return [
        scatter(
            "Fitting against generalising",
            dots,
            x=f"{fitting.name}: accuracy while learning, %",
            y=f"{general.name}: test accuracy, %",
            note="Crosses are 95 % intervals over the seeds. Up and to the right is better.",
        )
    ]


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


def _first(comparison: ArmComparison) -> float | None:
    """The mean of the first task over all runs: what a fresh network reaches there."""
    key = comparison.setting.headline
    runs = [rows for arm in comparison.arms.values() for rows in arm.runs.values()]
    values = [rows[0][key] for rows in runs if rows and rows[0].get(key) is not None]
    return abs(sum(values) / len(values)) if values else None


def _meaningless(comparison: ArmComparison, key: str) -> bool:
    """Test accuracy of random labels is chance by construction: no picture."""
    return "random" in comparison.setting.stream


def _bands(comparison: ArmComparison) -> str:
    count = len(comparison.seeds)
    if count < SEEDS_FOR_INTERVAL:
        return f"{'One seed' if count == 1 else 'Two seeds'}: no intervals."
    return f"Mean over {count} seeds with its 95 % interval."
