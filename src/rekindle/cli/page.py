"""`rekindle report`: the page from results that were kept as JSON; writing pages, and where results come from."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

import rekindle
from rekindle import files
from rekindle.cli import options
from rekindle.cli.terminal import refuse_existing, reported, say


def made(command: str) -> dict[str, Any]:
    """Where a result comes from: the command line and the versions.

    >>> made("inspect")["command"]
    'inspect'
    """
    import numpy
    import torch

    return {
        "rekindle": rekindle.__version__,
        "command": command,
        "made": {
            "line": " ".join(map(shlex.quote, ["rekindle", *sys.argv[1:]])),
            "versions": {
                "rekindle": rekindle.__version__,
                "torch": torch.__version__,
                "numpy": numpy.__version__,
                "python": platform.python_version(),
            },
            "platform": platform.platform(),
            "threads": torch.get_num_threads(),
        },
    }


def write_page(path: Path, data: Mapping[str, Any] | str, force: bool) -> None:
    """The page of a result, or one that is rendered, written whole or not at all."""
    from rekindle.report import render

    text = data if isinstance(data, str) else render(data)
    files.write(path, text, overwrite=force)
    say(f"page: {path} ({len(text.encode()) / 1e6:.2g} MB)")


@reported
def report(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="JSON...",
            help="What --json printed, or a Health, Plan, Receipt, Advice or ProbeResult saved as JSON; several go on "
            "one page.",
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
    refuse_existing(output, force, *results)
    data: dict[str, Any] = {}
    for path in results:
        for key, value in _read(path).items():
            data[key] = {**data[key], **value} if isinstance(data.get(key), dict) and isinstance(value, dict) else value
    write_page(output, made(str(data.get("command", "report"))) | data, force)


def _read(path: Path) -> dict[str, Any]:
    """A result under the name that the page knows it by."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if isinstance(found, dict):
        if "rekindle" in found and "command" in found:
            return found
        if "rekindle_plan" in found:
            return {"plan": found}
        if "records" in found and "method" in found:
            return {"receipt": found}
        if "weights" in found and "verdict" in found:
            return {"health": found}
        if "answer" in found and "rows" in found:
            return {"advice": found}
        if "score" in found and "fresh" in found:
            return {"probe": found}
    raise ValueError(
        f"{path} is not a result of rekindle: expected what --json printed, or a Health, Plan, Receipt, Advice or "
        "ProbeResult"
    )
