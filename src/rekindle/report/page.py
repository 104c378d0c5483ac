"""render(): the page of a result. Verdict first, then the table, spectra, heat maps, plan, receipt, how to reproduce.

Everything that matters is plain HTML, so that it is there without scripts and on paper; the script sorts, filters
and draws the large spectrum of a layer when it is opened. Names only ever become text: they are escaped here, set
as textContent there, and the content policy of the page runs no script but ours and fetches nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from rekindle.report.charts import DFI_BOUNDS, DRIFT_BOUNDS, RANK_BOUNDS, heat_map
from rekindle.report.sections import findings, glossary, numbers, plan, reasons, receipt, reproduce
from rekindle.report.table import layer_table
from rekindle.report.view import Headline, Row, headline, rows, sides
from rekindle.report.words import CHANGES, MEASURES, RECORD, number, plural, size, text

_TITLES = {"inspect": "Health of {}", "fire": "FIRE on {}", "compare": "{} against {}"}
_FLAME = "M12 2c1 4 6 6 6 12a6 6 0 0 1-12 0c0-3 2-4 2-7 2 1 3 2 3 4 1-2 2-5 1-9z"
_ICONS = {
    "healthy": "M5 13l4 4L19 7",
    "done": "M5 13l4 4L19 7",
    "watch": "M12 6v8M12 18v.5",
    "act": "M7 7l10 10M17 7L7 17",
    "plan": "M6 8h12M6 12h12M6 16h8",
}


def render(data: Mapping[str, Any]) -> str:
    """The whole page as text.

    >>> page = render({"command": "inspect", "health": {"weights": {}, "verdict": "healthy", "rule": "no rule fired"}})
    >>> page.startswith("<!doctype html>"), "http://" in page or "https://" in page
    (True, False)
    """
    table = rows(data)
    first = headline(data, table)
    title = _title(data)
    style, script = (files("rekindle.report").joinpath(name).read_text() for name in ("style.css", "script.js"))
    # Only a script with this digest runs, whatever a name in the data holds.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; base-uri 'none'"
    )
    body = "".join(
        (
            _header(data, title),
            '<main id="main">',
            _verdict(first),
            numbers(data, table),
            findings(data, table),
            layer_table(data, table),
            _maps(data, table),
            receipt(data),
            plan(data),
            reasons(data),
            reproduce(data),
            glossary(data),
            "</main>",
        )
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<link rel="icon" href="data:,"><title>{text(title)} · rekindle</title><style>{style}</style></head>'
        f'<body><a class="skip" href="#main">Skip to the result</a>{body}'
        f'<script type="application/json" id="data">{_embedded(data, table)}</script>'
        f"<script>{script}</script></body></html>"
    )


def _embedded(data: Mapping[str, Any], table: Sequence[Row]) -> str:
    """What the script needs to show a layer that is opened; no `<` survives, so nothing can end the element."""
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
    packed = json.dumps({"layers": layers, "words": words}, separators=(",", ":"), allow_nan=False)
    return packed.replace("<", "\\u003c").replace("&", "\\u0026")


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


def _header(data: Mapping[str, Any], title: str) -> str:
    facts = []
    for key in ("source", "target") if data.get("command") == "compare" else ("source",):
        about = data.get(key)
        if about:
            which = {"source": "A ", "target": "B "}[key] if data.get("command") == "compare" else ""
            facts.append(
                f"{which}{about['name']}: {about['format']}, {plural(about['tensors'], 'tensor')}, "
                f"{plural(about['numbers'], 'number')} ({', '.join(about['dtypes'])}), {size(about['bytes'])}"
            )
    lines = "".join(f"<p>{text(fact)}</p>" for fact in facts)
    return (
        '<header><div class="top"><span class="mark"><svg viewBox="0 0 24 24" aria-hidden="true">'
        f'<path d="{_FLAME}"/></svg>rekindle</span>'
        '<button type="button" id="theme" hidden>Dark</button></div>'
        f"<h1>{text(title)}</h1>{lines}</header>"
    )


def _verdict(first: Headline) -> str:
    more = "".join(f"<p>{text(line)}</p>" for line in first.more)
    return (
        f'<section class="verdict {text(first.level)}" aria-label="Verdict">'
        f'<svg viewBox="0 0 24 24" aria-hidden="true"><path d="{_ICONS.get(first.level, _ICONS["plan"])}"/></svg>'
        f'<div><p class="word">{text(first.word)}</p>'
        f'<p class="said">{text(first.sentence)}</p>{more}</div></section>'
    )


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
