"""`rekindle fire`: project the matrices of a checkpoint and write a new one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from rekindle.checkpoint import fire_file, open_checkpoint
from rekindle.cli import options
from rekindle.cli.inspect import examined
from rekindle.cli.page import write_page
from rekindle.cli.planning import draw
from rekindle.cli.provenance import made
from rekindle.cli.terminal import progress, refuse_existing, say, show, show_json, speaking, width
from rekindle.engine.isometry import Solver
from rekindle.projection.receipt import Receipt


@speaking
def fire(
    path: options.Source,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="OUT", help="The new checkpoint, same format.", show_default=False),
    ] = None,
    targets: options.Targets = None,
    scale: options.ScaleRule = "paper",
    strength: Annotated[float, typer.Option(help="t in (0, 1]: W ← (1 − t)·W + t·s·Q.")] = 1.0,
    include: options.Include = None,
    exclude: options.Exclude = None,
    heads: options.Heads = None,
    conv: options.ConvRule = "taps",
    split_heads: options.SplitHeads = False,
    plan: options.PlanFile = None,
    config: options.Config = None,
    model: options.Model = None,
    solver: Annotated[Solver, typer.Option(help="auto is exact and certified; paper is the released recipe.")] = "auto",
    tol: Annotated[float, typer.Option(help="Largest DfI per dimension of a factor.")] = 1e-6,
    steps: Annotated[int | None, typer.Option(help="A fixed number of solver steps.", show_default=False)] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Store every floating-point tensor as float32, bfloat16, …", show_default="as they are"),
    ] = None,
    optimizer_state: Annotated[
        Literal["fresh", "moments", "step", "none"],
        typer.Option(help="What becomes of optimizer state in a training checkpoint."),
    ] = "fresh",
    in_place: Annotated[bool, typer.Option("--in-place", help="Replace the checkpoint itself.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a large job that was interrupted.")] = False,
    json: options.Json = False,
    html: options.Html = None,
    force: options.Force = False,
) -> None:
    """Replace the weight matrices of a checkpoint by their nearest isometries, scaled.

    Everything is checked first, the input stays as it is, and the output appears under its name only when it is
    whole. Look first with [bold]rekindle plan[/].

    [bold]Examples[/]

      rekindle fire model.safetensors -o rekindled.safetensors

      rekindle fire ./my-model -o ./rekindled --targets attention.qk --scale nearest --html report.html

      rekindle fire resnet.pth -o new.pth --plan plan.json
    """
    target = _target(path, output, in_place)
    if html is not None:
        refuse_existing(html, force)
    asked = options.planning(targets, include, exclude, heads, scale, conv, split_heads)
    planned, described_by = options.loaded_plan(plan), options.skeleton(config, model)
    data: dict[str, Any] = {}
    if html is not None:
        # Before the first write: an in-place job leaves nothing to measure afterwards.
        if planned is None:
            with open_checkpoint(path) as checkpoint:
                planned = draw(checkpoint, described_by, asked)
            asked = {}
        before, data = examined(path, described_by, planned)
        data |= {"health": before.health.to_dict(), "plan": planned.to_dict()}
    receipt = _run(
        path,
        None if in_place else target,
        plan=planned,
        **asked,
        config=described_by,
        strength=strength,
        solver=solver,
        tol=tol,
        steps=steps,
        dtype=dtype,
        optimizer_state=optimizer_state,
        force=force,
        in_place=in_place,
        resume=resume,
    )
    data |= made("fire") | {"receipt": receipt.to_dict()}
    if html is not None:
        after, written = examined(target, described_by, planned)
        spectra = {name: {"before": curve} for name, curve in before.spectra.items()}
        for name, curve in after.spectra.items():
            spectra.setdefault(name, {})["after"] = curve
        data |= {"after": after.health.to_dict(), "spectra": spectra, "target": written["source"]}
        write_page(html, data, force)
    if json:
        show_json(data)
    else:
        show(receipt.table(width()))
    say(f"written: {target}")


def _target(path: Path, output: Path | None, in_place: bool) -> Path:
    if output is None and not in_place:
        raise ValueError("where to? -o OUT names the new checkpoint, --in-place replaces this one")
    if output is not None and in_place:
        raise ValueError("-o and --in-place exclude each other")
    return path if output is None else output


def _run(path: Path, target: Path | None, **asked: Any) -> Receipt:
    with progress(f"firing {path.name}", 1.0) as advance:
        seen = 0.0

        def tell(done: float, total: float, *_: object) -> None:
            nonlocal seen
            now = done / total if total else 1.0
            advance(now - seen)
            seen = now

        return fire_file(path, target, progress=tell, **asked)
