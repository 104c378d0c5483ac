"""render(): the page of a study. What was found first, then tables, curves, differences, retention, health, reasons.

It takes what `Results.to_dict()` gives, and uses the same layout as the page of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rekindle.extras import install
from rekindle.lab.results.comparison import FIRE, ArmComparison, comparisons
from rekindle.lab.results.wording import duration
from rekindle.lab.views import figures
from rekindle.lab.views.atlas import Atlas
from rekindle.lab.views.svg import STYLE, Picture, colors
from rekindle.lab.views.text import NOT_YET, call, columns, sentences, won
from rekindle.report.page import document, source
from rekindle.report.view import Headline
from rekindle.report.words import listed, plural

_HERE = "rekindle.lab.views"
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


def render(data: Mapping[str, Any]) -> str:
    """The whole page as text.

    >>> page = render({"study": {"name": "empty"}, "settings": {}, "runs": []})
    >>> page.startswith("<!doctype html>"), "No run has finished yet." in page
    (True, True)
    """
    found = comparisons(data)
    study: Mapping[str, Any] = data.get("study") or {}
    return document(
        "study.html",
        packages=("rekindle.report", _HERE),
        title=f"Laboratory: {study.get('name', 'a study')}",
        facts=_facts(found),
        first=_first(found),
        script=f"{source('script.js')}\n{source('page.js', _HERE)}",
        data={},
        style=source("page.css", _HERE) + STYLE,
        over_all=[_atlas(found).figure()] if len(found) > 1 and any(each.ranked for each in found) else [],
        streams=[_stream(each, alone=len(found) == 1) for each in found],
        made=_made(data, study),
        words=listed(_WORDS),
    )


def _facts(found: Sequence[ArmComparison]) -> list[str]:
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


def _atlas(found: Sequence[ArmComparison]) -> Picture:
    return Atlas.of(found).picture()


def _stream(found: ArmComparison, *, alone: bool) -> dict[str, Any]:
    """One stream as the template takes it."""
    shown = columns(found) if found.ranked else []
    ink = colors(figures.shown_arms(found))
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
            _pictures("Learning, task by task", figures.learning(found)),
            _pictures("Against doing nothing", figures.differences(found)),
            _pictures("What is kept of earlier tasks", figures.retention(found), paired=True),
            _pictures("Health over time", figures.health(found), paired=True),
        ],
        "reasons": [("Refused, and why", found.refused), ("Failed", found.failed)],
    }


def _cell(column: Any, arm: str) -> dict[str, Any]:
    value = column.value(arm)
    return {
        "heading": column.heading,
        "shown": column.shown(value),
        "sort": None if value is None else f"{value:.8g}",
        "ends": column.ends(arm) if value is not None else "",
    }


def _pictures(heading: str, drawn: Sequence[Picture], *, paired: bool = False) -> dict[str, Any]:
    return {"heading": heading, "kind": "pair" if paired else "one", "drawn": [each.figure() for each in drawn]}


def _made(data: Mapping[str, Any], study: Mapping[str, Any]) -> dict[str, Any]:
    line = study.get("command") or f"rekindle lab run {study.get('name', 'STUDY')}"
    made = data.get("made") or {}
    versions = ", ".join(f"{key} {value}" for key, value in (made.get("versions") or {}).items())
    note = "; ".join(filter(None, (versions, versions and made.get("platform"), made.get("code"))))
    return {"lines": [install("lab"), line], "note": note}
