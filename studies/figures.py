"""Figures in sentences: which stored value each is.

    python studies/figures.py            # what is wrong with the figures of README and docs/evidence

docs/evidence/figures.yaml holds, by page, pieces of its sentences. What is in braces there is put in from the stored
runs; a piece without braces holds a figure that is not measured here, and says in a comment whose it is.

    {mean STORE SETTING ARM}           the headline's mean
    {ends STORE SETTING ARM}           its interval
    {gain STORE SETTING ARM OTHER}     the paired difference, with its sign
    {size STORE SETTING ARM OTHER}     the same without it
    {gap STORE SETTING ARM OTHER}      its interval
    {METRIC:mean STORE SETTING ARM}    another number of the task rows
    {drawn NAME}                       the mean over seeds of a number of benchmarks/claims.py
    {spread NAME}                      the smallest and the largest of them
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from statistics import fmean

import yaml
from evidence import HOME, PAGES, STORES, results

from rekindle.lab.results.statistics import t_interval
from rekindle.lab.results.wording import measure

ELSEWHERE = ("dawn.md",)  # a script makes it
_MADE = re.compile(r"<!-- table:.*?<!-- end -->|```.*?```|<!--.*?-->", re.DOTALL)
_NO_FIGURE = re.compile(r"`[^`]*`|\]\([^)]*\)|\d{4}\.\d{5}|(torch|Python|Apache-|GPT-)\s?\d[\d.]*|\b95 ?%")
_FIGURE = re.compile(r"[+−]?\d[\d,]*\.\d+|\B\.\d+|[+−]\d[\d,]*|\d[\d,]*(?= ?%| points| nats| times|-fold|×)")


def pages() -> list[Path]:
    """README and the pages of evidence that people wrote."""
    return [HOME / "README.md", *(path for path in sorted(PAGES.glob("*.md")) if path.name not in ELSEWHERE)]


def filled(piece: str) -> str:
    """A piece of a sentence with its figures in place of the braces."""
    return " ".join(re.sub(r"\{(.+?)\}", lambda match: _value(match[1]), piece).split())


def _value(words: str) -> str:
    metric, _, rest = words.rpartition(":")
    kind, *given = rest.split()
    if kind in ("drawn", "spread"):
        found = json.loads((STORES / "claims.json").read_text("utf-8"))["values"][given[0]]
        return f"{fmean(found):.3g}" if kind == "drawn" else f"[{min(found):.3g}, {max(found):.3g}]"
    store, setting, arm, *other = (word.replace("+tuned", " (tuned)") for word in given)
    found = results(store).comparisons[setting]
    unit = measure(metric) if metric else found.headline
    if kind in ("mean", "ends"):
        around = t_interval(list(found.arms[arm].values(metric or "headline").values()))
        return unit.number(around.mean) if kind == "mean" else unit.ends(around)
    pair = found.differences(metric or "headline", other[0])[arm]
    if kind == "gap":
        return unit.difference_ends(pair)
    return unit.difference(pair.mean) if kind == "gain" else unit.number(abs(pair.mean))


def unfounded(path: Path) -> list[str]:
    """What is wrong with the figures in a page's sentences: pieces that are not there, figures that have no piece."""
    pieces = yaml.safe_load((PAGES / "figures.yaml").read_text("utf-8")).get(path.name) or []
    text, wrong = " ".join(_MADE.sub(" ", path.read_text("utf-8")).split()), []
    for piece in map(filled, pieces):
        wrong += [] if piece in text else [f"not in the page: {piece}"]
        text = text.replace(piece, " ")
    rest = _NO_FIGURE.sub(" ", text)
    return wrong + [f"no source: …{rest[max(0, m.start() - 50) : m.end() + 20]}…" for m in _FIGURE.finditer(rest)]


def main() -> None:
    """The command."""
    found = {path.name: wrong for path in pages() if (wrong := unfounded(path))}
    for name, wrong in found.items():
        print(f"{name}:", *wrong, sep="\n  ")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
