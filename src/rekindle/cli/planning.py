"""`rekindle plan`: the dry run on a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

from rekindle.checkpoint import Checkpoint, open_checkpoint
from rekindle.cli import options
from rekindle.cli.examination import Advance
from rekindle.cli.terminal import (
    as_json,
    progress,
    refuse_existing,
    say,
    show,
    show_json,
    speaking,
    width,
    write_text,
)
from rekindle.projection.planning import Entry, Plan, look
from rekindle.report.words import printable


@speaking
def plan(
    path: options.Source,
    targets: options.Targets = None,
    scale: options.ScaleRule = "paper",
    include: options.Include = None,
    exclude: options.Exclude = None,
    heads: options.Heads = None,
    conv: options.ConvRule = "taps",
    split_heads: options.SplitHeads = False,
    config: options.Config = None,
    model: options.Model = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PLAN.json", help="Keep the plan for fire --plan.", show_default=False),
    ] = None,
    json: options.Json = False,
    force: options.Force = False,
) -> None:
    """Show what fire would do to every tensor of a checkpoint, and why it leaves the others alone.

    [bold]Examples[/]

      rekindle plan ./my-model

      rekindle plan ./my-model --targets attention.qk --scale nearest

      rekindle plan resnet.pth --model torchvision.models:resnet18 -o plan.json
    """
    if output is not None:
        refuse_existing(output, force)
    asked = options.planning(targets, include, exclude, heads, scale, conv, split_heads)
    with open_checkpoint(path) as checkpoint:
        drawn = draw(checkpoint, options.skeleton(config, model), asked)
    if output is not None:
        write_text(output, as_json(drawn.to_dict()), force)
        say(f"plan: {output}")
    if json:
        show_json(drawn.to_dict())
    else:
        show(drawn.table(width()))


def draw(checkpoint: Checkpoint, config: Any, asked: Mapping[str, Any]) -> Plan:
    """The plan of a checkpoint with the DfI of what it projects, measured one tensor at a time."""
    drawn = checkpoint.plan(config=config, measure=False, **asked)
    if checkpoint.config_note:
        say(f"[yellow]note:[/] {escape(printable(checkpoint.config_note))}")
    total = sum(torch.Size(entry.shape).numel() for entry in drawn.selected)
    with progress(f"planning {checkpoint.path.name}", total) as advance:
        entries = tuple(_measured(drawn, entry, checkpoint, advance) for entry in drawn.entries)
    return replace(drawn, entries=entries)


def _measured(drawn: Plan, entry: Entry, checkpoint: Checkpoint, advance: Advance) -> Entry:
    if entry.reason is not None:
        return entry
    weight = checkpoint.read(entry.key)
    seen = [look(block, weight, scale, True) for block, scale in zip(entry.blocks, entry.scales, strict=True)]
    advance(weight.numel())
    small = tuple(int((norms < drawn.min_norm).sum()) for norms, _, _ in seen)
    if all(few == block.count for few, block in zip(small, entry.blocks, strict=True)):
        return replace(entry, reason=f"norm below min_norm ({drawn.min_norm:g}): a zero weight is taken as intended")
    return replace(entry, dfi=tuple(dfi for _, dfi, _ in seen), dfi_free=tuple(free for *_, free in seen), small=small)
