"""The parts of the page around the table: key numbers, findings, receipt, plan, reasons, how to reproduce, words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rekindle.extras import DISTRIBUTION
from rekindle.report.view import Row, signs
from rekindle.report.view import reasons as grouped_reasons
from rekindle.report.words import name, number, plural, text

_MOST_NAMED = 400
_TOTALS = (
    ("parameters", "parameters changed"),
    ("matrices", "matrices changed"),
    ("dfi_before", "DfI before, summed"),
    ("dfi_after", "DfI after, summed"),
    ("sfe_relative", "SFE ÷ ‖W‖²"),
    ("residual", "largest residual of a factor"),
    ("residual_stored", "largest residual as stored"),
    ("steps", "solver steps at most"),
    ("completed", "directions completed"),
    ("fallback", "matrices solved by float64 SVD"),
)


def numbers(data: Mapping[str, Any], table: Sequence[Row]) -> str:
    """A few large numbers under the verdict."""
    tiles: list[tuple[str, str]] = []
    both = any(row.after for row in table)
    count = sum(int(row.before.get("matrices", row.record.get("count", 1)) or 1) for row in table)
    if table:
        tiles.append((plural(len(table), "layer"), plural(count, "matrix", "matrices")))
    for label, values, kind in (
        ("scale-free DfI, mean", [[_get(row, w, "dfi_scale_free") for row in table] for w in ("before", "after")], ""),
        ("effective rank ÷ k, mean", [[row.rank_share(w) for row in table] for w in ("before", "after")], "share"),
        ("drift, mean", [[row.change.get("drift") for row in table], []], ""),
    ):
        means = [_mean(each) for each in values]
        if means[0] is not None:
            second = f" → {number(means[1], kind)}" if both and means[1] is not None else ""
            tiles.append((f"{number(means[0], kind)}{second}", label))
    zero = sum(row.before.get("dead_rows", 0) for row in table)
    if any("dead_rows" in row.before for row in table) and not both:
        tiles.append((number(zero), "zero rows"))
    shown = "".join(f"<div><b>{text(value)}</b><span>{text(label)}</span></div>" for value, label in tiles)
    return f'<section class="tiles" aria-label="Key numbers">{shown}</section>' if shown else ""


def findings(data: Mapping[str, Any], table: Sequence[Row]) -> str:
    """What was found, a card a sign."""
    judged = data.get("after") if data.get("command") == "compare" else data.get("health")
    cards = []
    for sign in signs(table, (judged or {}).get("findings", ())):
        where = _names(sign["layers"]) if sign["layers"] else ""
        places = plural(len(sign["layers"]), "layer") if sign["layers"] else "whole model"
        cards.append(
            f'<article class="finding {sign["level"]}"><h3><span class="flag {sign["level"]}">{sign["level"]}</span> '
            f"{text(sign['sign'])} <small>{places}</small></h3><p>{text(sign['text'])}"
            f"{', for one' if len(sign['layers']) > 1 else ''}. <i>Rule: {text(sign['rule'])}.</i></p>"
            f"<p>What helps: {text(sign['remedy'])}.</p>{where}</article>"
        )
    return f"<section><h2>Findings</h2>{''.join(cards)}</section>" if cards else ""


def receipt(data: Mapping[str, Any]) -> str:
    """Totals of what was done."""
    found = data.get("receipt")
    if not found:
        return ""
    totals = found.get("totals", {})
    facts = [(label, number(totals[key])) for key, label in _TOTALS if totals.get(key) is not None]
    facts += [(key, number(amount)) for key, amount in totals.get("counts", {}).items()]
    facts += [
        (key.replace("_", " "), str(value)) for key, value in found.get("settings", {}).items() if value is not None
    ]
    state = found.get("optimizer")
    if state:
        facts.append(("optimizer slots reset", f"{state['reset']} of {state['matched']}, policy {state['policy']}"))
    facts.append(("time", f"{number(found.get('seconds', 0.0))} s"))
    listed = "".join(f"<div><dt>{text(key)}</dt><dd>{text(value)}</dd></div>" for key, value in facts)
    notes = "".join(f'<p class="note">{text(note)}</p>' for note in found.get("notes", ()))
    return f'<section><h2>Receipt</h2><dl class="facts">{listed}</dl>{notes}</section>'


def plan(data: Mapping[str, Any]) -> str:
    """What was to be projected, and at which scale."""
    found = data.get("plan")
    if not found:
        return ""
    chosen = [entry for entry in found["entries"] if entry["reason"] is None]
    lines = []
    for entry in chosen:
        scales = sorted({number(scale) for scale in entry["scales"] if scale is not None}) or [str(found["scale"])]
        count = sum(int(block.get("count", 1)) for block in entry["blocks"])
        lines.append(
            f"<tr><th scope='row'>{name(entry['name'])}</th><td>{text(entry['role'])}</td>"
            f"<td class='n'>{'×'.join(map(str, entry['shape']))}</td><td class='n'>{count}</td>"
            f"<td class='n'>{text(', '.join(scales))}</td></tr>"
        )
    heads = "".join(f"<th scope='col'>{word}</th>" for word in ("parameter", "role", "shape", "matrices", "scale"))
    return (
        f"<section><h2>Plan</h2><p>{len(chosen)} of {plural(len(found['entries']), 'parameter')} to project; targets "
        f"<b>{text(found['targets'])}</b>, scale <b>{text(found['scale'])}</b>, convolutions: {text(found['conv'])}."
        f'</p><details><summary>Every planned parameter</summary><div class="scroll" tabindex="0" role="group" '
        f'aria-label="Plan"><table class="plain"><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody>'
        "</table></div></details></section>"
    )


def reasons(data: Mapping[str, Any]) -> str:
    """What was left alone or not measured, grouped by why."""
    groups = grouped_reasons(data)
    if not groups:
        return ""
    acted = data.get("receipt") or data.get("plan")
    listed = "".join(
        f"<details><summary><b>{len(names):,}</b> × {text(reason)}</summary>{_names(names, linked=False)}</details>"
        for reason, names in groups
    )
    return f"<section><h2>{'Left alone, and why' if acted else 'Not measured, and why'}</h2>{listed}</section>"


def reproduce(data: Mapping[str, Any]) -> str:
    """The command and the versions."""
    made = data.get("made")
    if not made:
        return ""
    versions = ", ".join(f"{key} {value}" for key, value in made["versions"].items())
    settings = f"{versions}; {made['platform']}, {plural(made['threads'], 'thread')}"
    return (
        '<section><h2>How to reproduce</h2><div class="code"><pre tabindex="0"><code>'
        f'pip install "{DISTRIBUTION}[cli]=='
        f'{text(made["versions"]["rekindle"])}"\n{text(made["line"])}</code></pre>'
        f'<button type="button" id="copy" hidden>Copy</button></div><p class="note">{text(settings)}</p></section>'
    )


def glossary(data: Mapping[str, Any]) -> str:
    """The words, for whoever gets the page by mail."""
    words = (
        (
            "isometry",
            "a matrix all of whose singular values are equal: it passes every direction on with the same strength.",
        ),
        ("DfI", "deviation from isometry, ‖(W/s)(W/s)ᵀ − I‖²_F on the smaller side; 0 is an isometry at scale s."),
        ("SFE", "squared Frobenius error ‖W − W̃‖²_F: how much a weight was changed."),
        ("effective rank", "exp of the entropy of the singular values: how many directions really count, at most k."),
        ("k", "the smaller side of a matrix, the number of its singular values."),
    )
    listed = "".join(f"<div><dt>{text(word)}</dt><dd>{text(meaning)}</dd></div>" for word, meaning in words)
    return f'<section class="glossary"><h2>Words</h2><dl>{listed}</dl></section>'


def _names(names: Sequence[str], *, linked: bool = True) -> str:
    shown = "".join(
        f'<li><button type="button" class="to" data-layer="{text(each)}">{name(each)}</button></li>'
        if linked
        else f"<li>{name(each)}</li>"
        for each in names[:_MOST_NAMED]
    )
    rest = f"<li>and {len(names) - _MOST_NAMED:,} more</li>" if len(names) > _MOST_NAMED else ""
    body = f'<ul class="names">{shown}{rest}</ul>'
    return f"<details><summary>Which layers</summary>{body}</details>" if linked and len(names) > 3 else body


def _get(row: Row, which: str, key: str) -> Any:
    return getattr(row, which).get(key)


def _mean(values: Sequence[Any]) -> float | None:
    known = [value for value in values if isinstance(value, int | float)]
    return sum(known) / len(known) if known else None
