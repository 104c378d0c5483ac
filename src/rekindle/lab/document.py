"""A study as a Markdown document: what was seen, the tables, the pictures beside it, and the command that made it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rekindle.lab import gallery
from rekindle.lab.canvas import Picture
from rekindle.lab.contest import Contest, contests
from rekindle.lab.summary import columns


@dataclass(frozen=True)
class Document:
    """The text, and the pictures that it shows by their file names."""

    text: str
    pictures: Mapping[str, str]


def document(data: Mapping[str, Any], stem: str) -> Document:
    """The document; its pictures are called `<stem>-….svg`, so that several documents share a folder.

    >>> document({"study": {"name": "empty"}, "settings": {}, "runs": [], "table": []}, "empty").text
    '# empty\\n\\nNo run has finished yet.\\n'
    """
    found = contests(data)
    study = data.get("study") or {}
    lines = [f"# {study.get('name', 'A study')}", ""]
    pictures: dict[str, str] = {}
    if not any(contest.ranked for contest in found):
        return Document("\n".join([*lines, "No run has finished yet.", ""]), {})
    if study.get("command"):
        lines += ["```sh", str(study["command"]), "```", ""]
    if len(found) > 1:
        lines += _shown([*gallery.over_streams(found), *gallery.trade_off(found)], f"{stem}-streams", pictures)
    for contest in found:
        name = f"{stem}-{_file(contest.name)}" if len(found) > 1 else stem
        lines += [f"## {contest.name}", ""] if len(found) > 1 else []
        lines += [*contest.said(), ""]
        lines += table(contest)
        drawn = (*gallery.learning(contest)[:1], *gallery.differences(contest), *gallery.retention(contest)[:1])
        lines += _shown(drawn, name, pictures)
        for word, reasons in (("Refused", contest.refused), ("Failed", contest.failed)):
            lines += [f"- {word}: `{arm}`: {why}" for arm, why in reasons.items()]
            lines += [""] if reasons else []
    versions = (data.get("made") or {}).get("versions") or {}
    if versions:
        lines += [f"Made with {', '.join(f'{key} {value}' for key, value in versions.items())}.", ""]
    return Document("\n".join(lines), pictures)


def table(contest: Contest) -> list[str]:
    """The lines of the table, and under it what its numbers are."""
    if not contest.table:
        return []
    shown = columns(contest)
    lines = [f"| arm | {' | '.join(column.heading for column in shown)} |", f"|---|{'---:|' * len(shown)}"]
    for at, row in enumerate(contest.table):
        cells = [column.text(row) for column in shown]
        cells[0] = f"**{cells[0]}**" if at == 0 else cells[0]
        lines.append(f"| {row['arm']} | {' | '.join(cells)} |")
    meanings = "; ".join(f"{column.heading}: {column.meaning}" for column in shown)
    return [*lines, "", f"<small>{meanings}.</small>", ""]


def _shown(drawn: Iterable[Picture], stem: str, pictures: dict[str, str]) -> list[str]:
    lines = []
    for at, picture in enumerate(drawn, 1):
        name = f"{stem}-{at}.svg"
        pictures[name] = picture.file()
        lines += [f"![{picture.described}]({name})", ""]
    return lines


def _file(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-." else "-" for c in name)
