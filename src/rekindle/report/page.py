"""render(): the page of a result. Verdict first, then the table, spectra, heat maps, plan, receipt, how to reproduce.

Everything that matters is plain HTML, so that it is there without scripts and on paper; the script sorts, filters
and draws the large spectrum of a layer when it is opened. Names only ever become text: the templates escape them
here, the script sets them as textContent.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from rekindle.extras import DISTRIBUTION, require
from rekindle.report import advice
from rekindle.report.charts import DFI_BOUNDS, DRIFT_BOUNDS, RANK_BOUNDS, heat_map, sparkline
from rekindle.report.markup import environment
from rekindle.report.view import BlockRow, Headline, columns, headline, present, reasons, rows, sides, signs
from rekindle.report.words import CHANGES, GLOSSARY, MEASURES, RECORD, listed, number, plural, size

if TYPE_CHECKING:
    from markupsafe import Markup

_TITLES = {"inspect": "Health of {}", "fire": "FIRE on {}"}
_MOST_NAMED = 400
_LAYER = (("Layer", "the parameter, and its part in brackets"), ("role", "what it does"), ("shape", "count · out × in"))
_TOTALS = """
parameters      | parameters changed
matrices        | matrices changed
dfi_before      | DfI before, summed
dfi_after       | DfI after, summed
sfe_relative    | SFE ÷ ‖W‖²
residual        | largest residual of a factor
residual_stored | largest residual as stored
steps           | solver steps at most
completed       | directions completed
fallback        | matrices solved by float64 SVD
"""


_EXPLAINED = ("frame", "angle out")  # above the table: nobody knows these from elsewhere
_UNITS = (
    ("neurons", "how many there are", "units", ""),
    ("dormant", "share whose activity is far below the layer's mean", "dormant", "share"),
    ("dead", "share that is never active", "dead", "share"),
    ("usage", "mean share of inputs on which a neuron is active", "usage", "share"),
    ("feature rank", "effective rank of the layer's outputs", "feature_rank", ""),
)


def render(data: Mapping[str, Any]) -> str:
    """The whole page as text.

    >>> page = render({"command": "inspect", "health": {"weights": {}, "verdict": "healthy", "rule": "no rule fired"}})
    >>> page.startswith("<!doctype html>"), "http://" in page or "https://" in page
    (True, False)
    """
    if data.get("advice") or data.get("probe") or data.get("ranking"):
        return _asked(data)
    compared = data.get("command") == "compare"
    table = sorted(rows(data), key=lambda row: compared and not row.changed)
    judged = data.get("after") if compared else data.get("health")
    return document(
        "report.html",
        title=_title(data),
        facts=_facts(data),
        first=headline(data, table),
        script=source("script.js"),
        data=_embedded(data, table),
        most=_MOST_NAMED,
        tiles=_tiles(table),
        signs=signs((judged or {}).get("findings", ())),
        **_layers(data, table),
        units=_units(judged or {}),
        unit_headings=[(heading, meaning) for heading, meaning, *_ in _UNITS],
        maps=_maps(data, table),
        receipt=_receipt(data.get("receipt")),
        plan=_plan(data.get("plan")),
        reasons=reasons(data),
        made=_made(data.get("made")),
        words=listed(GLOSSARY),
    )


def _asked(data: Mapping[str, Any]) -> str:
    """The page of a probe or an advice."""
    what = "Advice for {}" if data.get("advice") else "Plasticity of {}" if data.get("probe") else "Where to start: {}"
    about = data.get("source") or {}
    return document(
        "advice.html",
        title=what.format(about.get("name") or "a model"),
        facts=[about["text"]] if about.get("text") else [],
        first=advice.first(data),
        script=source("script.js"),
        data={},
        style=advice.STYLE,
        made=_made(data.get("made")),
        words=listed(advice.WORDS),
        **advice.parts(data),
    )


def document(
    template: str,
    *,
    title: str,
    facts: Sequence[str],
    first: Headline,
    script: str,
    data: Mapping[str, Any],
    style: str = "",
    packages: Sequence[str] = ("rekindle.report",),
    **parts: object,
) -> str:
    """A page from a template that extends document.html, with the one script that may run and the data it reads."""
    markup = require("markupsafe", "cli", "a page").Markup
    # Only a script with this digest runs, whatever a name in the data holds.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; base-uri 'none'"
    )
    # No `<` survives in the JSON, so that nothing can end its element.
    packed = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c").replace("&", "\\u0026")
    return (
        environment(*packages)
        .get_template(template)
        .render(
            title=title,
            facts=facts,
            first=first,
            policy=markup(policy),
            style=markup(source("style.css") + style),
            script=markup(script),
            data=markup(packed),
            **parts,
        )
    )


def source(name: str, package: str = "rekindle.report") -> str:
    """A style or script that is part of the package.

    >>> source("script.js").startswith('"use strict"')
    True
    """
    return files(package).joinpath(name).read_text(encoding="utf-8")


def _layers(data: Mapping[str, Any], table: Sequence[BlockRow]) -> dict[str, Any]:
    """The table of layers and its tools."""
    shown = columns(table)
    drawings = [sparkline(row.curves) for row in table]
    return {
        "rows": [_Shown(row, shown, drawing) for row, drawing in zip(table, drawings, strict=True)],
        "headings": [*_LAYER, *((column.heading, column.meaning) for column in shown)],
        "roles": sorted({row.role for row in table if row.role}),
        "drawn": any(drawings),
        "paired": any(column.pair for column in shown),
        "folded": data.get("command") == "compare" and 0 < sum(row.changed for row in table) < len(table),
        "explained": [(c.heading, c.meaning) for c in shown if c.heading in _EXPLAINED],
        "sides": sides(data),
        "marked": sum(bool(row.findings) for row in table),
        "changed": sum(row.changed for row in table) if any(row.record or row.change for row in table) else None,
    }


class _Shown:
    """A row with its cells, as the template takes it."""

    def __init__(self, row: BlockRow, shown: Sequence[Any], drawing: Markup | str) -> None:
        self.name, self.role, self.shape, self.volume = row.name, row.role, row.shape, row.volume
        self.level, self.rank, self.changed, self.drawing = row.level, row.rank, row.changed, drawing
        self.cells = [
            {"heading": column.heading, "shown": text, "sort": sort}
            for column in shown
            for text, sort in [column.cell(row)]
        ]


def _tiles(table: Sequence[BlockRow]) -> list[tuple[str, str]]:
    """A few large numbers under the verdict."""
    if not table:
        return []
    both = any(row.after for row in table)
    count = sum(int(row.before.get("matrices", row.record.get("count", 1)) or 1) for row in table)
    tiles = [(plural(len(table), "layer"), plural(count, "matrix", "matrices"))]
    free = [[getattr(row, which).get("dfi_scale_free") for row in table] for which in ("before", "after")]
    share = [[row.rank_share(which) for row in table] for which in ("before", "after")]
    drift: list[list[Any]] = [[row.change.get("drift") for row in table], []]
    for label, values, kind in (
        ("scale-free DfI, mean", free, ""),
        ("effective rank ÷ k, mean", share, "share"),
        ("drift, mean", drift, ""),
    ):
        means = [_mean(each) for each in values]
        if means[0] is not None:
            second = f" → {number(means[1], kind)}" if both and means[1] is not None else ""
            tiles.append((f"{number(means[0], kind)}{second}", label))
    if any("dead_rows" in row.before for row in table) and not both:
        tiles.append((number(sum(row.before.get("dead_rows", 0) for row in table)), "zero rows"))
    return tiles


def _mean(values: Sequence[Any]) -> float | None:
    known = [value for value in values if present(value)]
    return sum(known) / len(known) if known else None


def _maps(data: Mapping[str, Any], table: Sequence[BlockRow]) -> list[Markup | str]:
    both = any(row.after for row in table)
    shown = list(sides(data).items())
    maps = []
    for which, label in shown if both else shown[:1]:
        when = f", {label}" if both else ""
        dfi = {row.name: getattr(row, which).get("dfi_scale_free") for row in table}
        maps.append(heat_map(f"Deviation from isometry, scale-free{when}", table, dfi, DFI_BOUNDS, "high"))
        share = {row.name: row.rank_share(which) for row in table}
        maps.append(heat_map(f"Effective rank, share of its maximum{when}", table, share, RANK_BOUNDS, "low"))
    if data.get("command") == "compare":
        drift = {row.name: row.change.get("drift") for row in table}
        maps.append(heat_map("Drift ‖B − A‖ ÷ ‖A‖", table, drift, DRIFT_BOUNDS, "high"))
    return [each for each in maps if each]


def _units(health: Mapping[str, Any]) -> list[list[str]]:
    """What the neurons of each layer do, where batches were given: a row per layer under `_UNITS`."""
    about = health.get("about", {})
    return [
        [name, about.get(name, {}).get("kind", ""), *(number(found.get(key), kind) for _, _, key, kind in _UNITS)]
        for name, found in health.get("units", {}).items()
    ]


def _receipt(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Totals of what was done."""
    if not found:
        return None
    totals = found.get("totals", {})
    facts = [(label, number(totals[key])) for key, label in listed(_TOTALS) if totals.get(key) is not None]
    facts += [(key, number(amount)) for key, amount in totals.get("counts", {}).items()]
    settings = found.get("settings", {})
    facts += [(key.replace("_", " "), str(value)) for key, value in settings.items() if value is not None]
    state = found.get("optimizer")
    if state:
        facts.append(("optimizer slots reset", f"{state['reset']} of {state['matched']}, policy {state['policy']}"))
    facts.append(("time", f"{number(found.get('seconds', 0.0))} s"))
    return {"facts": facts, "notes": found.get("notes", ())}


def _plan(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What was to be projected, and at which scale."""
    if not found:
        return None
    chosen = [
        {
            "name": entry["name"],
            "role": entry["role"],
            "shape": "×".join(map(str, entry["shape"])),
            "count": sum(int(block.get("count", 1)) for block in entry["blocks"]),
            "scale": ", ".join(sorted({number(scale) for scale in entry["scales"] if scale is not None}))
            or str(found["scale"]),
        }
        for entry in found["entries"]
        if entry["reason"] is None
    ]
    facts = {key: found[key] for key in ("targets", "scale", "conv")}
    return {"chosen": chosen, "count": len(found["entries"]), **facts}


def _made(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The command and the versions."""
    if not found:
        return None
    versions = ", ".join(f"{key} {value}" for key, value in found["versions"].items())
    return {
        "lines": [f'pip install "{DISTRIBUTION}[cli]=={found["versions"]["rekindle"]}"', found["line"]],
        "note": f"{versions}; {found['platform']}, {plural(found['threads'], 'thread')}",
    }


def _embedded(data: Mapping[str, Any], table: Sequence[BlockRow]) -> dict[str, Any]:
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
