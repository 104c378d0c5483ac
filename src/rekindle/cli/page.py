"""Writing the page, and `rekindle report`, which makes it from results that were kept as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from rekindle.cli import options
from rekindle.cli.provenance import made
from rekindle.cli.terminal import refuse_existing, say, speaking, write_text
from rekindle.report import render


def write_page(path: Path, data: Mapping[str, Any], force: bool) -> None:
    """The page of a result, written whole or not at all."""
    text = render(data)
    write_text(path, text, force)
    say(f"page: {path} ({len(text.encode()) / 1e6:.2g} MB)")


@speaking
def report(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="JSON...",
            help="What --json printed, or Health, Plan or Receipt saved as JSON; several are put on one page.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The page.")] = Path("report.html"),
    force: options.Force = False,
) -> None:
    """Make the page from results that were kept as JSON.

    One self-contained file: it opens offline, on a phone and from a mail attachment.

    [bold]Examples[/]

      rekindle inspect model.safetensors --json > health.json

      rekindle report health.json -o report.html

      rekindle report plan.json receipt.json
    """
    refuse_existing(output, force)
    data: dict[str, Any] = {}
    for path in results:
        for key, value in _read(path).items():
            data[key] = {**data[key], **value} if isinstance(data.get(key), dict) and isinstance(value, dict) else value
    write_page(output, made(str(data.get("command", "report"))) | data, force)


def _read(path: Path) -> dict[str, Any]:
    """A result under the name that the page knows it by."""
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if isinstance(found, dict):
        if "rekindle" in found and "command" in found:
            return found
        if "rekindle_plan" in found:
            return {"plan": found}
        if "records" in found and "method" in found:
            return {"receipt": found}
        if "weights" in found and "verdict" in found:
            return {"health": found}
    raise ValueError(f"{path} is no result of rekindle: expected what --json printed, or a Health, Plan or Receipt")
