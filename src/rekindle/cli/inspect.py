"""`rekindle inspect`: the health of every matrix of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from rekindle.checkpoint import Checkpoint, open_checkpoint
from rekindle.cli import options
from rekindle.cli.examination import Examination, Layer, examine, layers_of
from rekindle.cli.page import write_page
from rekindle.cli.provenance import described, made
from rekindle.cli.terminal import FINDINGS, progress, refuse_existing, say, show, show_json, speaking, width
from rekindle.diagnosis.text import described as health_text
from rekindle.diagnosis.verdict import LEVELS
from rekindle.projection.planning import Plan
from rekindle.report.words import printable


@speaking
def inspect(
    path: options.Source,
    config: options.Config = None,
    model: options.Model = None,
    plan: options.PlanFile = None,
    reference: Annotated[
        Path | None,
        typer.Option(help="An earlier checkpoint of the same model: makes the verdict sure.", show_default=False),
    ] = None,
    cheap: options.Cheap = False,
    fail_on: options.FailOn = "never",
    json: options.Json = False,
    html: options.Html = None,
    force: options.Force = False,
) -> None:
    """Tell how healthy every weight matrix of a checkpoint is, and give a verdict.

    Spectra, ranks, deviation from isometry (DfI), zero and similar neurons, from the weights alone and one tensor in
    memory at a time. Nothing is changed.

    [bold]Examples[/]

      rekindle inspect model.safetensors

      rekindle inspect ./my-model --html report.html

      rekindle inspect last.ckpt --reference first.ckpt --fail-on act
    """
    if html is not None:
        refuse_existing(html, force)
    described_by, planned = options.skeleton(config, model), options.loaded_plan(plan)
    found, data = examined(path, described_by, planned, cheap=cheap)
    health = found.health
    if reference is not None:
        earlier, _ = examined(reference, described_by, planned, cheap=cheap)
        health = health.against(earlier.health)
        data["reference"] = str(reference)
    data |= made("inspect") | {
        "health": health.to_dict(),
        "spectra": {k: {"before": v} for k, v in found.spectra.items()},
    }
    if html is not None:
        write_page(html, data, force)
    if json:
        show_json(data)
    else:
        show(health_text(health, width()))
    if fail_on != "never" and health.verdict.level >= LEVELS.index(fail_on):
        raise typer.Exit(FINDINGS)


def examined(
    path: Path, config: Any, plan: Plan | None, *, cheap: bool = False, what: str = "measuring"
) -> tuple[Examination, dict[str, Any]]:
    """The examination of one file with its progress on the terminal, and what the file is."""
    with open_checkpoint(path) as checkpoint:
        layers = usable(checkpoint, config, plan)
        with progress(f"{what} {path.name}", sum(layer.numbers for layer in layers)) as advance:
            found = examine(checkpoint, layers, mode="cheap" if cheap else "full", advance=advance)
        return found, {"source": described(checkpoint)}


def usable(checkpoint: Checkpoint, config: Any, plan: Plan | None) -> list[Layer]:
    """The layers of a file; a file without a single matrix that is sure is an error that says how to help."""
    layers, note = layers_of(checkpoint, config, plan)
    if note:
        say(f"[yellow]note:[/] {escape(printable(note))}")
    if not any(layer.reason is None for layer in layers):
        reasons = sorted({layer.reason for layer in layers if layer.reason and len(layer.shape) > 1})
        why = f": {'; '.join(reasons[:3])}" if reasons else ""
        raise ValueError(
            f"{checkpoint.path} holds {len(layers)} tensors and no matrix that can be measured{why}. "
            "--config, --model or --plan tell how tensors are used"
        )
    unsure = sum(layer.reason is not None and "state dict alone" in layer.reason for layer in layers)
    if unsure:
        say(f"[yellow]note:[/] {unsure} tensors are left out; --config, --model or --plan tell how they are used")
    return layers
