"""render(): the page of a study. What was found first, then tables, curves, differences, retention, health, reasons.

It uses the same layout as the page of a checkpoint. `learning` and its like are the pictures that a study has.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from typing import Any

from rekindle.extras import install
from rekindle.lab.results import Results
from rekindle.lab.results.comparison import FIRE, NOTHING, ArmComparison
from rekindle.lab.results.statistics import SEEDS_FOR_INTERVAL
from rekindle.lab.results.wording import duration, measure
from rekindle.lab.settings import RETURNS
from rekindle.lab.views import NOT_YET, ArmColumn, call, columns, sentences, won
from rekindle.lab.views.atlas import Atlas
from rekindle.lab.views.plots import Line, Whisker, curves, forest
from rekindle.lab.views.svg import COLORS, STYLE, Picture, colors
from rekindle.report.page import document, source
from rekindle.report.view import Headline
from rekindle.report.words import listed, plural

_HERE = "rekindle.lab.views"
_KNOWN_FIRST = (FIRE, NOTHING, "full-reset")
_HEALTH = ("dormant", "effective_rank", "dfi", "norm")
_WORDS = """
stream | a sequence of tasks, or data that grow, which a network learns one after the other.
arm | one remedy with its settings. All arms of a seed see the same data, in the same order, from one start.
accuracy while learning | answers that were right before the step that learned from them, over a whole task.
interval | 95 %, from Student's t over the seeds; differences are paired, seed by seed. Under three seeds: the values.
p (Holm) | how often chance alone gives such a difference, corrected (Holm) for comparing several arms.
drop | how much worse the previous task is right after the remedy, before any training.
kept | how well up to five earlier tasks are still done right after the remedy, the last one among them.
dormant | neurons that are nearly always inactive; measured where the network can be measured.
feature rank | how many directions a layer's activations really use, as a share of what they could.
DfI | deviation from isometry at the matrix's own scale: 0 is an isometry.
"""


def render(results: Results, command: str = "") -> str:
    """The whole page as text, with the command that made the study.

    >>> page = render(Results({"name": "empty"}, ()))
    >>> page.startswith("<!doctype html>"), "No run has finished yet." in page
    (True, True)
    """
    found = list(results.comparisons.values())
    return document(
        "study.html",
        packages=("rekindle.report", _HERE),
        title=f"Laboratory: {results.study['name']}",
        facts=_summary(found),
        first=_first(found),
        script=f"{source('script.js')}\n{source('page.js', _HERE)}",
        data={},
        style=source("page.css", _HERE) + STYLE,
        over_all=[Atlas.of(found).picture().figure()] if len(found) > 1 and any(each.ranked for each in found) else [],
        streams=[_stream_view(each, alone=len(found) == 1) for each in found],
        made=_how_made(results, command),
        words=listed(_WORDS),
    )


def _summary(found: Sequence[ArmComparison]) -> list[str]:
    arms = list(dict.fromkeys(arm for each in found for arm in each.values))
    seeds = {seed for each in found for seed in each.seeds}
    runs = sum(len(values) for each in found for values in each.values.values())
    rows = [row for each in found for arm in each.arms.values() for tasks in arm.runs.values() for row in tasks]
    spent = sum(float(row.get("seconds") or 0) for row in rows)
    return [
        f"{plural(len(found), 'stream')}, {plural(len(arms), 'arm')}, {plural(len(seeds), 'seed')}: "
        f"{plural(runs, 'finished run')}, {duration(spent)} of computing"
    ]


def _first(found: Sequence[ArmComparison]) -> Headline:
    """Neutral in color: an experiment has a result, not a mark."""
    if not any(each.ranked for each in found):
        return Headline("plan", "No result", NOT_YET)
    if len(found) == 1:
        first, *more = sentences(found[0])
        return Headline("plan", "Result", first, tuple(more))
    best = [each.name for each in found if won(each)]
    ran = [each for each in found if each.ranked]
    variants = any(won(each) and each.ranked[0] != FIRE for each in found)
    name = "FIRE, or a variant of it," if variants else "FIRE"
    sentence = f"{name} has the best mean on {len(best)} of {plural(len(ran), 'stream')}"
    sentence += f": {', '.join(best)}." if best else "."
    more = [f"{each.name}: {' '.join(sentences(each)[:2])}" for each in ran]
    return Headline("plan", "Result", sentence, tuple(more))


def _stream_view(found: ArmComparison, *, alone: bool) -> dict[str, Any]:
    """One stream as the template takes it."""
    shown = columns(found) if found.ranked else []
    ink = colors(shown_arms(found))
    return {
        "name": found.name,
        "alone": alone,
        "sentences": [] if alone else sentences(found),
        "columns": [(column.heading, column.meaning) for column in shown],
        "calls": [(arm, call(found.arms[arm].arm, found.setting)) for arm in found.ranked],
        "rows": [
            {
                "arm": arm,
                "ink": ink.get(arm, ""),
                "best": at == 0,
                "cells": [_cell(column, arm) for column in shown],
            }
            for at, arm in enumerate(found.ranked)
        ],
        "pictures": [
            _pictures("Learning, task by task", learning(found)),
            _pictures("Against doing nothing", differences(found)),
            _pictures("What is kept of earlier tasks", retention(found), paired=True),
            _pictures("Health over time", health(found), paired=True),
        ],
        "reasons": [("Refused, and why", found.refused), ("Failed", found.failed)],
    }


def _cell(column: ArmColumn, arm: str) -> dict[str, Any]:
    value = column.value(arm)
    return {
        "heading": column.heading,
        "shown": column.shown(value),
        "sort": None if value is None else f"{value:.8g}",
        "ends": column.ends(arm) if value is not None else "",
    }


def _pictures(heading: str, drawn: Sequence[Picture], *, paired: bool = False) -> dict[str, Any]:
    return {"heading": heading, "kind": "pair" if paired else "one", "drawn": [each.figure() for each in drawn]}


def _how_made(results: Results, command: str) -> dict[str, Any]:
    versions = ", ".join(f"{key} {value}" for key, value in results.versions().items())
    note = "; ".join(filter(None, (versions, versions and platform.platform(), results.provenance())))
    return {"lines": [install("lab"), command or f"rekindle lab run {results.study['name']}"], "note": note}


# The pictures


def shown_arms(comparison: ArmComparison) -> list[str]:
    """The arms that get a color: FIRE, nothing and the full reset, then the best of the others."""
    first = [arm for arm in _KNOWN_FIRST if arm in comparison.values]
    rest = [arm for arm in comparison.ranked if arm not in first][: COLORS - len(_KNOWN_FIRST)]
    # In the order of the study, so that a color does not change with the result where all arms have one.
    return [*first, *(arm for arm in comparison.values if arm in rest)]


def learning(comparison: ArmComparison) -> list[Picture]:
    """The headline over the tasks, and the test measure beside it where it means something."""
    drawn, setting, classes = [], comparison.setting, comparison.classes
    # Test accuracy of random labels is chance by construction: no picture.
    other = {"online_accuracy": "test_accuracy", "online_loss": "test_loss"}.get(setting.headline)
    for key in (setting.headline, *([other] if other and "random" not in setting.stream else [])):
        share = measure(key).unit == "%"
        count = len(comparison.seeds)
        few = f"{'One seed' if count == 1 else 'Two seeds'}: no intervals."
        more = {
            "level": (100.0 / classes, "chance") if share and classes else None,
            "start": 0.0 if share else None,
            "note": few if count < SEEDS_FOR_INTERVAL else f"Mean over {count} seeds with its 95 % interval.",
        }
        drawn += _curves(comparison, f"{_capital(measure(key).name)} on each task", key, **more)
    return drawn


def differences(comparison: ArmComparison) -> list[Picture]:
    """Each arm minus doing nothing."""
    measured, whiskers = comparison.headline, []
    for arm in comparison.ranked:
        difference = comparison.against(arm, NOTHING) if arm != NOTHING else None
        if difference is not None:
            low, high = (None if end is None else measured.times * end for end in (difference.low, difference.high))
            whiskers.append(Whisker(arm, measured.times * difference.mean, low, high))
    if not whiskers:
        return []
    better, worse = ("better", "worse") if measured.higher else ("worse", "better")
    return [
        forest(
            f"{_capital(measured.name)}: each arm minus doing nothing, paired by seed",
            whiskers,
            x=f"difference, {measured.step}" if measured.step else "difference",
            better=better,
            worse=worse,
            named=shown_arms(comparison),
        )
    ]


def retention(comparison: ArmComparison) -> list[Picture]:
    """What is left of earlier tasks right after the remedy, and at the end of each task."""
    key = "old_accuracy" if comparison.headline.unit == "%" else "old_loss"
    name, size = _capital(measure(key).name), (640, 300)
    return [
        *_curves(comparison, f"{name}, when a task begins, right after the remedy", f"{key}_start", size=size),
        *_curves(comparison, f"{name}, when a task ends", key, size=size),
    ]


def health(comparison: ArmComparison) -> list[Picture]:
    """Measures of the network at the end of each task."""
    options: dict[str, Any] = {"start": 0.0, "size": (640, 280)}
    drawn = (_curves(comparison, _capital(measure(key).name), "health", key, **options) for key in _HEALTH)
    return [picture for pictures in drawn for picture in pictures]


def _curves(comparison: ArmComparison, title: str, *keys: str, **options: Any) -> list[Picture]:
    lines, axis = _lines(comparison, *keys), measure(keys[-1].removesuffix("_start")).axis
    return [curves(title, lines, x="task", y=axis, named=shown_arms(comparison), **options)] if lines else []


def _lines(comparison: ArmComparison, *keys: str) -> list[Line]:
    """Curves of a measure in its unit; a band ends where the measure does, whatever few seeds make of its interval."""
    measured = measure(keys[-1].removesuffix("_start"))
    bottom = -math.inf if keys[-1] in RETURNS else 0.0
    top = 100.0 if measured.unit == "%" else math.inf
    lines = []
    for arm in comparison.arms:
        curve = comparison.curve(arm, *keys)
        if curve is not None:
            mean, low, high = (
                [None if value is None else measured.times * value for value in curve[end]]
                for end in ("mean", "low", "high")
            )
            ends = ([None if value is None else min(max(value, bottom), top) for value in end] for end in (low, high))
            lines.append(Line(arm, range(1, len(mean) + 1), mean, *ends))
    return lines


def _capital(words: str) -> str:
    return words[0].upper() + words[1:]
