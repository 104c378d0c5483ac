"""Plain text tables for a terminal: plan, receipt, health and comparison all print through `table`.

Strings in, lines out; nothing here knows what the columns mean. Long names lose their shared prefix first, then their
middle, and never the layer numbers.

>>> rows = [["encoder.layers.0.attn.weight", "1.5"], ["encoder.layers.11.attn.weight", "20"]]
>>> print("\\n".join(table(["parameter", "norm"], rows, 34)))
parameter (encoder.layers.…)  norm
0.attn.weight                  1.5
11.attn.weight                  20
"""

from __future__ import annotations

import itertools
import math
import shutil
import textwrap
from collections.abc import Collection, Sequence

GAP = "  "
NAME = 24  # a longer name is shortened before a column is left out
_NARROWEST, _TEXT = 12, 28


def terminal_width(otherwise: int = 110, most: int = 140) -> int:
    """Columns of the terminal, or `otherwise` where there is none.

    >>> terminal_width(80, 100) <= 100
    True
    """
    return min(shutil.get_terminal_size((otherwise, 24)).columns, most)


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    *,
    left: Collection[int] = (0,),
    drop: Sequence[int] = (),
    most: int | None = None,
) -> list[str]:
    """Aligned lines under `head`, at most `width` columns wide where the cells allow it.

    The first column holds names. A row with fewer cells than `head` ends in a text that takes the rest of the line,
    and goes on below itself if it is long. Columns that are empty everywhere are left out; where the terminal is
    narrow, those in `drop` go, in that order. `left` are aligned to the left, all others to the right. Of more than
    `most` rows the middle is left out.

    >>> table(["a", "b", "c"], [["x", "1", ""], ["y", "skipped, with a reason"]], 20)
    ['a  b', 'x  1', 'y  skipped, with a', '   reason']
    """
    head, body = list(head), [list(row) for row in rows]
    last = len(head) - 1
    full = [row for row in body if len(row) == len(head)]
    kept = [c for c in range(len(head)) if c == 0 or any(row[c] for row in full)]
    widths = [max(len(row[c]) for row in [head, *body] if c < len(row) - (len(row) <= last)) for c in range(len(head))]
    flows = last in kept and last in left and last > 0
    text = min(widths[last], 2 * _TEXT) if flows else widths[last]

    def taken(name: int) -> int:
        return name + sum((text if c == last else widths[c]) + len(GAP) for c in kept if c)

    prefix = shared_prefix([row[0] for row in body]) if taken(widths[0]) > width else ""
    if prefix:
        head[0] += f" ({prefix}…)"
        for row in body:
            row[0] = row[0].removeprefix(prefix)
        widths[0] = max(len(row[0]) for row in [head, *body])
    for column in drop:
        if taken(min(widths[0], NAME)) > width and column in kept:
            kept.remove(column)
    widths[0] = max(min(widths[0], _NARROWEST), min(widths[0], width - taken(0)))
    lines = []
    shown_rows: list[list[str] | None] = [head, *_middle_cut(body, most)]
    for each in shown_rows:
        if each is None:
            lines.append(f"… {len(body) - (most or 0)} more …")
            continue
        row = each
        whole = len(row) == len(head)
        cells = [elide(row[0], widths[0]), *row[1:]]
        shown = [c for c in kept if c < len(row) - 1] if not whole or flows else kept
        line = GAP.join(cells[c].ljust(widths[c]) if c in left else cells[c].rjust(widths[c]) for c in shown)
        if not whole or flows:
            room = max(min(_TEXT, width), width - len(line) - len(GAP))
            first, *more = textwrap.wrap(row[-1], room, break_on_hyphens=False) or [""]
            lines.append(f"{line}{GAP}{first}".rstrip())
            lines += [" " * (len(line) + len(GAP)) + part for part in more]
        else:
            lines.append(line.rstrip())
    return lines


def shared_prefix(names: Sequence[str]) -> str:
    """The dotted beginning that all names have: it carries no information, and space is short.

    >>> shared_prefix(["model.h.0.fc.weight", "model.h.1.fc.weight"])
    'model.h.'
    """
    if len(set(names)) < 2:
        return ""
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
    return "".join(f"{level[0]}." for level in itertools.takewhile(lambda level: len(set(level)) == 1, levels))


def elide(name: str, width: int) -> str:
    """A dotted name in `width` characters: what stays longest are its numbers and its end.

    >>> elide("transformer.h.10.attn.c_attn.weight", 24)
    '…10.attn.c_attn.weight'
    >>> elide("model.layers.3.mlp.experts.12.gate_proj.weight", 28)
    '…3…12.gate_proj.weight'
    >>> elide("encoder.layer.0.attention.output.dense.weight", 24)
    '…0…output.dense.weight'
    >>> elide("a_rather_long_name_without_dots", 16)
    'a_rat…thout_dots'
    """
    if len(name) <= width:
        return name
    *path, owner, last = ["", *name.split(".")]
    places = [at for at, part in enumerate(path) if part.isdigit()]
    if places:
        numbers = "…" + "…".join(path[at] for at in places)
        shorter = "…" + ".".join([*path[places[0] :], owner, last])
        after = [*path[places[-1] + 1 :], owner, last]
        ends = (numbers + (".…"[at > 0]) + ".".join(after[at:]) for at in range(len(after) - 1))
        for text in (shorter, *ends):
            if len(text) <= width:
                return text
        if len(numbers) + 4 < width:
            return f"{numbers}…{name[len(name) - (width - len(numbers) - 1) :]}"
    front = (width - 1) // 3
    return f"{name[:front]}…{name[len(name) - (width - 1 - front) :]}"


def number(value: float | None) -> str:
    """Three figures; empty for what was not measured, so that a measured zero is seen.

    >>> [number(each) for each in (None, 0.0, 12, 0.123456, 1.5e-7, 2.5e6, float("inf"))]
    ['', '0', '12', '0.123', '1.5e-07', '2.5e+06', '∞']
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if isinstance(value, int) or value == 0:
        return f"{value:g}"
    return f"{value:.1e}" if abs(value) >= 1e5 or abs(value) < 1e-3 else f"{value:.3g}"


def share(value: float | None) -> str:
    """A share in per cent.

    >>> share(0.5), share(0.0123), share(None)
    ('50%', '1.2%', '')
    """
    if value is None:
        return ""
    return f"{value:.1%}" if 0 < value < 0.1 else f"{value:.0%}"


def wrapped(sentence: str, width: int, indent: str = GAP) -> list[str]:
    """A sentence in lines of at most `width`, further lines indented.

    >>> wrapped("one two three", 9)
    ['one two', '  three']
    """
    return textwrap.wrap(sentence, width, subsequent_indent=indent, break_on_hyphens=False)


def _middle_cut(rows: list[list[str]], most: int | None) -> list[list[str] | None]:
    if most is None or len(rows) <= most:
        return [*rows]
    return [*rows[: most // 2], None, *rows[most // 2 - most :]]
