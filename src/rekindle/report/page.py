"""render(): the page of a result. Verdict first, then the table, spectra, heat maps, plan, receipt, how to reproduce.

Everything that matters is plain HTML, so that it is there without scripts and on paper; the script sorts, filters
and draws the large spectrum of a layer when it is opened. Names only ever become text: they are escaped here, set
as textContent there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from rekindle.report.charts import DFI_BOUNDS, DRIFT_BOUNDS, RANK_BOUNDS, heat_map
from rekindle.report.frame import banner, document, header
from rekindle.report.sections import findings, glossary, numbers, plan, reasons, receipt, reproduce
from rekindle.report.table import layer_table
from rekindle.report.view import Row, headline, rows, sides
from rekindle.report.words import CHANGES, MEASURES, RECORD, number, plural, size

_TITLES = {"inspect": "Health of {}", "fire": "FIRE on {}", "compare": "{} against {}"}


def render(data: Mapping[str, Any]) -> str:
    """The whole page as text.

    >>> page = render({"command": "inspect", "health": {"weights": {}, "verdict": "healthy", "rule": "no rule fired"}})
    >>> page.startswith("<!doctype html>"), "http://" in page or "https://" in page
    (True, False)
    """
    table = rows(data)
    first = headline(data, table)
    title = _title(data)
    body = "".join(
        (
            banner(first.level, first.word, first.sentence, first.more),
            numbers(data, table),
            findings(data, table),
            layer_table(data, table),
            _maps(data, table),
            receipt(data),
            plan(data),
            reasons(data),
            reproduce(data),
            glossary(data),
        )
    )
    script = files("rekindle.report").joinpath("script.js").read_text()
    return document(title, header(title, _facts(data)), body, script=script, data=_embedded(data, table))


def _embedded(data: Mapping[str, Any], table: Sequence[Row]) -> dict[str, Any]:
    """What the script needs to show a layer that is opened."""
    layers = [
        {
            "name": row.name,
            "before": _known(row.before),
            "after": _known(row.after),
            "change": {key: value for key, value in _known(row.change).items() if key in CHANGES},
            "record": {key: value for key, value in _known(row.record).items() if key in RECORD},
            "curves": row.curves,
            "findings": [{key: f[key] for key in ("level", "text", "rule", "remedy")} for f in row.findings],
        }
        for row in table
    ]
    words = {"measures": MEASURES, "changes": CHANGES, "record": RECORD, "sides": sides(data)}
    return {"layers": layers, "words": words}


def _known(numbers: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in numbers.items():
        if isinstance(value, float):
            # Infinity is a finding (a singular matrix), and JSON has no word for it.
            found[key] = float(f"{value:.5g}") if math.isfinite(value) else number(value)
        elif isinstance(value, int | str):
            found[key] = value
    return found


def _title(data: Mapping[str, Any]) -> str:
    source, target = ((data.get(key) or {}).get("name", "") for key in ("source", "target"))
    if data.get("command") == "compare":
        return f"{target} against {source}"
    return _TITLES.get(str(data.get("command")), "Report on {}").format(source or "a model")


def _facts(data: Mapping[str, Any]) -> list[str]:
    facts = []
    for key in ("source", "target") if data.get("command") == "compare" else ("source",):
        about = data.get(key)
        if about:
            which = {"source": "A ", "target": "B "}[key] if data.get("command") == "compare" else ""
            facts.append(
                f"{which}{about['name']}: {about['format']}, {plural(about['tensors'], 'tensor')}, "
                f"{plural(about['numbers'], 'number')} ({', '.join(about['dtypes'])}), {size(about['bytes'])}"
            )
    return facts


def _maps(data: Mapping[str, Any], table: Sequence[Row]) -> str:
    compared = data.get("command") == "compare"
    both = any(row.after for row in table)
    shown = list(sides(data).items())
    maps = []
    for which, label in shown if both else shown[:1]:
        told = f", {label}" if both else ""
        dfi = {row.name: getattr(row, which).get("dfi_scale_free") for row in table}
        maps.append(heat_map(f"Deviation from isometry, scale-free{told}", table, dfi, DFI_BOUNDS, "high"))
        share = {row.name: row.rank_share(which) for row in table}
        maps.append(heat_map(f"Effective rank, share of its maximum{told}", table, share, RANK_BOUNDS, "low"))
    if compared:
        drift = {row.name: row.change.get("drift") for row in table}
        maps.append(heat_map("Drift ‖B − A‖ ÷ ‖A‖", table, drift, DRIFT_BOUNDS, "high"))
    drawn = "".join(maps)
    if not drawn:
        return ""
    return (
        '<section><h2>Over depth</h2><p class="note">Across: the layer\'s number. The stronger the colour, the '
        f'worse. A cell leads to its layer in the table.</p><div class="maps">{drawn}</div></section>'
    )
