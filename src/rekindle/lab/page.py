"""render(): the page of a study. What was seen first, then tables, curves, differences, retention, health, reasons.

It takes what `Results.to_dict()` gives, and stands in the same frame as the page of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from rekindle.extras import install
from rekindle.lab import gallery
from rekindle.lab.canvas import STYLE, colours
from rekindle.lab.contest import FIRE, Contest, contests
from rekindle.lab.summary import columns
from rekindle.lab.wording import duration
from rekindle.report.frame import banner, document, header
from rekindle.report.words import plural, text

_WORDS = (
    ("arm", "one remedy with its settings. All arms of a seed see the same data, in the same order, from one start."),
    ("accuracy while learning", "answers that were right before the step that learned from them, over a whole task."),
    ("interval", "95 %, from Student's t over the seeds; differences are paired, seed by seed."),
    ("p (Holm)", "how often chance alone gives such a difference, corrected for comparing several arms."),
    ("drop", "how much worse the previous task is right after the remedy, before any training."),
    ("kept", "how well up to five earlier tasks are still done right after the remedy, the last one among them."),
    ("dormant", "neurons that hardly ever answer; measured where the network can be measured."),
    ("feature rank", "how many directions a layer's answers really use, as a share of what they could."),
    ("DfI", "deviation from isometry at the matrix's own scale: 0 is an isometry."),
)


def render(data: Mapping[str, Any]) -> str:
    """The whole page as text.

    >>> page = render({"study": {"name": "empty"}, "settings": {}, "runs": [], "table": []})
    >>> page.startswith("<!doctype html>"), "No run has finished yet." in page
    (True, True)
    """
    found = contests(data)
    title = f"Laboratory: {_study(data).get('name', 'a study')}"
    body = "".join(
        (
            _verdict(found),
            _contents(found),
            _over_streams(found),
            *(_stream(contest, at, alone=len(found) == 1) for at, contest in enumerate(found)),
            _reproduce(data),
            _glossary(),
        )
    )
    script = "\n".join(
        files(package).joinpath(name).read_text()
        for package, name in (("rekindle.report", "script.js"), ("rekindle.lab", "page.js"))
    )
    style = files("rekindle.lab").joinpath("page.css").read_text() + STYLE
    return document(title, header(title, _facts(data, found)), body, script=script, data={}, style=style)


def _study(data: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = data.get("study") or {}
    return found


def _facts(data: Mapping[str, Any], found: Sequence[Contest]) -> list[str]:
    arms = list(dict.fromkeys(arm for contest in found for arm in contest.values))
    seeds = {seed for contest in found for seed in contest.seeds}
    runs = sum(len(values) for contest in found for values in contest.values.values())
    tasks = [row for contest in found for seeds in contest.tasks.values() for rows in seeds.values() for row in rows]
    spent = sum(float(row.get("seconds") or 0) for row in tasks)
    return [
        f"{plural(len(found), 'stream')}, {plural(len(arms), 'arm')}, {plural(len(seeds), 'seed')}: "
        f"{plural(runs, 'finished run')}, {duration(spent)} of computing"
    ]


def _verdict(found: Sequence[Contest]) -> str:
    """Neutral in colour: an experiment has a result, not a mark."""
    if not found or not any(contest.ranked for contest in found):
        return banner("plan", "No result", "No run has finished yet.")
    if len(found) == 1:
        first, *more = found[0].said()
        return banner("plan", "What was seen", first, more)
    won = [contest.name for contest in found if contest.won]
    ran = sum(bool(contest.ranked) for contest in found)
    variants = any(contest.won and contest.ranked[0] != FIRE for contest in found)
    name = "FIRE, or a variant of it," if variants else "FIRE"
    sentence = f"{name} has the best mean on {len(won)} of {plural(ran, 'stream')}"
    sentence += f": {', '.join(won)}." if won else "."
    return banner("plan", "What was seen", sentence, [_first_words(contest) for contest in found if contest.ranked])


def _first_words(contest: Contest) -> str:
    said = contest.said()
    return f"{contest.name}: {' '.join(said[:2])}"


def _contents(found: Sequence[Contest]) -> str:
    if len(found) < 2:
        return ""
    links = "".join(f'<li><a href="#stream-{at}">{text(contest.name)}</a></li>' for at, contest in enumerate(found))
    return f'<nav aria-label="Streams"><ul class="toc">{links}</ul></nav>'


def _over_streams(found: Sequence[Contest]) -> str:
    if len(found) < 2:
        return ""
    drawn = [*gallery.over_streams(found), *gallery.trade_off(found)]
    shown = "".join(picture.figure() for picture in drawn)
    return f"<section><h2>Over all streams</h2>{shown}</section>" if shown else ""


def _stream(contest: Contest, at: int, *, alone: bool) -> str:
    said = "" if alone else "".join(f"<p>{text(sentence)}</p>" for sentence in contest.said())
    parts = (
        _table(contest),
        _pictures("Learning, task by task", gallery.learning(contest)),
        _pictures("Against doing nothing", gallery.differences(contest)),
        _pictures("What is kept of earlier tasks", gallery.retention(contest), paired=True),
        _pictures("Health over time", gallery.health(contest), paired=True),
        _reasons("Refused, and why", contest.refused),
        _reasons("Failed", contest.failed),
    )
    kind = "stream alone" if alone else "stream"
    heading = f'<section class="{kind}" id="stream-{at}"><h2>{text(contest.name)}</h2>'
    return f"{heading}{said}{''.join(parts)}</section>"


def _table(contest: Contest) -> str:
    if not contest.table:
        return ""
    shown = columns(contest)
    ink = colours(gallery.shown_arms(contest))
    heads = '<th scope="col" aria-sort="none"><button type="button">arm</button></th>' + "".join(
        f'<th scope="col" class="n" aria-sort="none"><button type="button" title="{text(column.meaning)}">'
        f"{text(column.heading)}</button></th>"
        for column in shown
    )
    lines = []
    for row in contest.table:
        cells = [f'<th scope="row" class="{ink.get(row["arm"], "")}">{text(row["arm"])}</th>']
        for column in shown:
            value, ends = column.value(row), column.ends(row)
            sort = "" if value is None else f' data-v="{value:.8g}"'
            more = f" <small>{text(ends)}</small>" if ends and value is not None else ""
            cells.append(f'<td class="n"{sort}>{text(column.shown(value))}{more}</td>')
        best = ' class="best"' if contest.ranked and row["arm"] == contest.ranked[0] else ""
        lines.append(f"<tr{best}>{''.join(cells)}</tr>")
    return (
        f'<div class="scroll wide sums" tabindex="0" role="group" aria-label="Table of {text(contest.name)}">'
        f'<table class="sortable"><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
        '<p class="note">A heading sorts; point at it for its meaning. The row of the best mean is shaded.</p>'
    )


def _pictures(heading: str, drawn: Iterable[Any], *, paired: bool = False) -> str:
    shown = "".join(picture.figure() for picture in drawn)
    if not shown:
        return ""
    return f'<h3 class="part">{text(heading)}</h3><div class="{"pair" if paired else "one"}">{shown}</div>'


def _reasons(heading: str, reasons: Mapping[str, str]) -> str:
    if not reasons:
        return ""
    listed = "".join(f"<dt>{text(arm)}</dt><dd>{text(reason)}</dd>" for arm, reason in reasons.items())
    return f'<h3 class="part">{text(heading)}</h3><dl class="why">{listed}</dl>'


def _reproduce(data: Mapping[str, Any]) -> str:
    study = _study(data)
    line = study.get("command") or f"rekindle lab run {study.get('name', 'STUDY')}"
    made = data.get("made") or {}
    versions = ", ".join(f"{key} {value}" for key, value in (made.get("versions") or {}).items())
    note = f'<p class="note">{text(versions)}{text("; " + made["platform"]) if made.get("platform") else ""}</p>'
    return (
        '<section><h2>How to reproduce</h2><div class="code"><pre tabindex="0"><code>'
        f"{install('lab')}\n{text(line)}</code></pre>"
        f'<button type="button" id="copy" hidden>Copy</button></div>{note if versions else ""}</section>'
    )


def _glossary() -> str:
    listed = "".join(f"<div><dt>{text(word)}</dt><dd>{text(meaning)}</dd></div>" for word, meaning in _WORDS)
    return f'<section class="glossary"><h2>Words</h2><dl>{listed}</dl></section>'
