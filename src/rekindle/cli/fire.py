"""`rekindle plan`: the dry run on a checkpoint; `rekindle fire`: project its matrices and write a new one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rekindle import files
from rekindle.cli import options
from rekindle.cli.inspect import answers, examined, moved_by
from rekindle.cli.page import made, write_page
from rekindle.cli.terminal import (
    FINDINGS,
    as_json,
    note,
    progress,
    refuse_existing,
    reported,
    say,
    share,
    show,
    show_json,
    width,
)
from rekindle.report.view import MOVED, how_far

if TYPE_CHECKING:
    from rekindle.checkpoint import Checkpoint
    from rekindle.projection.entries import PlanEntry
    from rekindle.projection.planning import Plan
    from rekindle.projection.receipt import Receipt

NOTHING = "nothing to project; --include NAME asks for a tensor that has a shape here, --model shows how all are used"
_SAFETENSORS, _TORCH = (".safetensors",), (".pt", ".pth", ".bin", ".ckpt")


@reported
def plan(
    path: options.Source,
    targets: options.Targets = None,
    scale: options.ScaleRule = "auto",
    include: options.Include = None,
    exclude: options.Exclude = None,
    heads: options.Heads = None,
    conv: options.ConvRule = "taps",
    split_heads: options.SplitHeads = False,
    config: options.Config = None,
    model: options.Model = None,
    plan: options.PlanFile = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PLAN.json", help="Keep the plan for fire --plan.", show_default=False),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Also predict the cost on N processes (FSDP2).", show_default=False),
    ] = None,
    json: options.Json = False,
    force: options.Force = False,
) -> None:
    """Show what fire would do to every tensor of a checkpoint, and why it skips the others.

    [bold]Examples[/]

      rekindle plan ./my-model

      rekindle plan ./my-model --targets attention.qk --scale nearest

      rekindle plan resnet.pth --model torchvision.models:resnet18 -o plan.json

      rekindle plan ./my-model --ranks 64

      rekindle plan model.pt --plan live.json --targets mlp
    """
    if output is not None:
        refuse_existing(output, force, path, config, plan)
    from rekindle.checkpoint import open_checkpoint

    asked = options.planning(targets, include, exclude, heads, scale, conv, split_heads)
    saved = options.loaded_plan(plan)
    described_by = options.architecture(config, model) if saved is None else saved
    with open_checkpoint(path) as checkpoint:
        as_saved = saved is not None and asked == options.planning(None, None, None, None, "auto", "taps", False)
        drawn = draw(checkpoint, described_by, asked | {"allow_empty": True}, as_saved)
    if not drawn.selected:
        note(NOTHING)
    if output is not None:
        files.write(output, as_json(drawn.to_dict()), overwrite=force)
        say(f"plan: {output}")
    costs = []
    if ranks is not None and drawn.selected:
        from rekindle.sharding.owners import estimate

        weights = [([block.layout for block in entry.blocks], entry.dtype.itemsize) for entry in drawn.selected]
        costs = [estimate(weights, ranks)]
    if json:
        show_json({**drawn.to_dict(), **({"costs": [asdict(cost) for cost in costs]} if costs else {})})
    else:
        show("\n".join([drawn.table(width()), *map(str, costs)]))


def draw(checkpoint: Checkpoint, config: Any, asked: Mapping[str, Any], as_saved: bool = False) -> Plan:
    """The plan of a checkpoint with the DfI of what it projects, measured one tensor at a time.

    config: also a plan saved from the live model, which is shown as it is where nothing else is asked for.
    """
    import torch

    from rekindle.checkpoint.opening import match_plan

    drawn = match_plan(config, checkpoint) if as_saved else checkpoint.plan(config=config, measure="none", **asked)
    if checkpoint.config_note:
        note(checkpoint.config_note)
    total = sum(torch.Size(entry.shape).numel() for entry in drawn.selected)
    with progress(f"planning {checkpoint.path.name}", total) as advance:
        entries = tuple(_measured(drawn, entry, checkpoint, advance) for entry in drawn.entries)
    return replace(drawn, entries=entries)


def _measured(drawn: Plan, entry: PlanEntry, checkpoint: Checkpoint, advance: Callable[[float], None]) -> PlanEntry:
    from rekindle.projection.measuring import look

    if entry.reason is not None:
        return entry
    weight = checkpoint.read(entry.key)
    seen = [look(block, weight, scale) for block, scale in zip(entry.blocks, entry.scales, strict=True)]
    advance(weight.numel())
    small = tuple(int((norms < drawn.min_norm).sum()) for norms, _, _ in seen)
    if all(few == block.count for few, block in zip(small, entry.blocks, strict=True)):
        return replace(entry, refusal=f"norm below min_norm ({drawn.min_norm:g}): a zero weight is taken as intended")
    return replace(entry, dfi=tuple(dfi for _, dfi, _ in seen), dfi_free=tuple(free for *_, free in seen), small=small)


@reported
def fire(
    path: options.Source,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="OUT", help="The new checkpoint, same format.", show_default=False),
    ] = None,
    targets: options.Targets = None,
    scale: options.ScaleRule = "auto",
    strength: Annotated[float, typer.Option(help="t in (0, 1]: W ← (1 − t)·W + t·s·Q.")] = 1.0,
    include: options.Include = None,
    exclude: options.Exclude = None,
    heads: options.Heads = None,
    conv: options.ConvRule = "taps",
    split_heads: options.SplitHeads = False,
    plan: options.PlanFile = None,
    config: options.Config = None,
    model: options.Model = None,
    data: options.Data = None,
    solver: Annotated[
        options.Solver, typer.Option(help="auto is exact and checked numerically; paper is the released recipe.")
    ] = "auto",
    tol: Annotated[float, typer.Option(help="Largest DfI per dimension of a factor.")] = 1e-6,
    steps: Annotated[int | None, typer.Option(help="A fixed number of solver steps.", show_default=False)] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Store every floating-point tensor as float32, bfloat16, …", show_default="as they are"),
    ] = None,
    biases: Annotated[
        Literal["keep", "zero"],
        typer.Option(help="zero: also those of projected layers (a ReLU that is dead by its bias survives FIRE)."),
    ] = "keep",
    optimizer_state: Annotated[
        Literal["fresh", "moments", "step", "none"],
        typer.Option(help="What becomes of optimizer state in a training checkpoint."),
    ] = "fresh",
    in_place: Annotated[bool, typer.Option("--in-place", help="Replace the checkpoint itself.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a large job that was interrupted.")] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask, and do not measure the weights beforehand.")
    ] = False,
    json: options.Json = False,
    html: options.Html = None,
    force: options.Force = False,
) -> None:
    """Replace the weight matrices of a checkpoint by their nearest isometries, scaled.

    Everything is checked first, the input stays as it is, and the output appears under its name only when it is
    whole. Look first with [bold]rekindle plan[/]. Where the weights alone do not say that it is needed, the command
    asks; scripts say [bold]--yes[/].

    [bold]Examples[/]

      rekindle fire model.safetensors -o model-fire.safetensors

      rekindle fire ./my-model -o ./my-model-fire --targets attention.qk --scale nearest --html report.html

      rekindle fire resnet.pth -o resnet-fire.pth --plan plan.json --yes
    """
    from rekindle.checkpoint import open_checkpoint

    target = _target(path, output, in_place)
    if html is not None:
        refuse_existing(html, force, path, plan, config)
        if html.absolute() == target.absolute():
            raise ValueError(f"{html} is the name of both the output and the page")
    asked = options.planning(targets, include, exclude, heads, scale, conv, split_heads)
    planned, described_by = options.loaded_plan(plan), options.architecture(config, model)
    facts: dict[str, Any] = {}
    if not yes:
        ask_first(path, described_by, planned)
    answered = answers(path, model, data)  # before the first write: an in-place job leaves nothing to measure
    if html is not None:
        if planned is None:
            with open_checkpoint(path) as checkpoint:
                planned = draw(checkpoint, described_by, asked)
            asked = {}
        before = examined(path, described_by, planned)
        facts |= {"source": before.source, "health": before.health.to_dict(), "plan": planned.to_dict()}
    how = {"strength": strength, "solver": solver, "tol": tol, "steps": steps, "dtype": dtype, "config": described_by}
    how |= {
        "biases": biases,
        "optimizer_state": optimizer_state,
        "force": force,
        "in_place": in_place,
        "resume": resume,
    }
    receipt = _run(path, None if in_place else target, plan=planned, **asked, **how)
    if answered is not None:
        receipt = replace(receipt, outputs_moved=moved_by(answered, answers(target, model, data)))
    facts |= made("fire") | {"receipt": receipt.to_dict()}
    if html is not None:
        after = examined(target, described_by, planned)
        spectra = {name: {"before": curve} for name, curve in before.spectra.items()}
        for name, curve in after.spectra.items():
            spectra.setdefault(name, {})["after"] = curve
        facts |= {"after": after.health.to_dict(), "spectra": spectra, "target": after.source}
        write_page(html, facts, force)
    if json:
        show_json(facts)
    else:
        show(receipt.table(width()))
    say(f"written: {target}")
    note(MOVED + ("" if answered is not None else f"; {how_far(None)}"))


def ask_first(path: Path, config: object, plan: Plan | None) -> None:
    """Say the verdict of the weights; where it is no reason to act, ask on a terminal, and refuse elsewhere."""
    verdict = examined(path, config, plan, cheap=True).health.verdict
    note(f"verdict of the weights: {verdict} ({verdict.rule})")
    if verdict == "act":
        return
    if not on_terminal():
        raise ValueError(
            f"the weights do not say that {path.name} needs this (verdict: {verdict}), and FIRE changes what a network "
            "computes: --yes does it all the same, rekindle inspect with --model and --data measures more"
        )
    if not typer.confirm("FIRE changes what the network computes; do it all the same?", default=False, err=True):
        say("nothing was written")
        raise typer.Exit(FINDINGS)


def on_terminal() -> bool:
    """Whether somebody can be asked."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def _target(path: Path, output: Path | None, in_place: bool) -> Path:
    if output is None and not in_place:
        raise ValueError("where to? -o OUT names the new checkpoint, --in-place replaces this one")
    if output is not None and in_place:
        raise ValueError("-o and --in-place exclude each other")
    if output is not None and path.exists():
        _check_extension(path, output)
    return path if output is None else output


def _check_extension(path: Path, output: Path) -> None:
    """The output has the format of the input: a name that says otherwise would mislead."""
    known = (*_SAFETENSORS, *_TORCH)
    if path.is_dir():
        if output.suffix in known:
            raise ValueError(
                f"{path} is a folder, and so is its output: {output.name} would be a folder named as a file"
            )
        return
    from rekindle.checkpoint import open_checkpoint

    with open_checkpoint(path) as checkpoint:
        safe = checkpoint.format.startswith("safetensors")
    wrong = _TORCH if safe else _SAFETENSORS
    if output.suffix in wrong:
        kind = "safetensors" if safe else "torch"
        better = output.with_suffix(path.suffix).name
        raise ValueError(f"{path.name} is a {kind} file and the output has the same format: name it {better}")


def _run(path: Path, target: Path | None, **asked: Any) -> Receipt:
    from rekindle.checkpoint import fire_file

    with share(f"firing {path.name}") as tell:
        return fire_file(path, target, progress=tell, **asked)
