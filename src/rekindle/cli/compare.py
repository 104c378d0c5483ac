"""`rekindle compare`: what changed between two checkpoints of one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import Tensor

from rekindle.checkpoint import open_checkpoint
from rekindle.cli import options
from rekindle.cli.comparison import Change, Tired, changes, tired
from rekindle.cli.examination import examine
from rekindle.cli.inspect import usable
from rekindle.cli.page import write_page
from rekindle.cli.provenance import described, made
from rekindle.cli.terminal import FINDINGS, progress, refuse_existing, show, show_json, speaking, width
from rekindle.diagnosis.examination import Health
from rekindle.diagnosis.verdict import LEVELS
from rekindle.tables import table

_HEADINGS = ("layer", "role", "shape", "drift", "SFE", "DfI/k A", "→ B", "eff. rank A", "→ B", "frame", "∠ out", "∠ in")


@speaking
def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="The earlier checkpoint.", show_default=False)],
    second: Annotated[Path, typer.Argument(metavar="B", help="The later one.", show_default=False)],
    config: options.Config = None,
    model: options.Model = None,
    plan: options.PlanFile = None,
    cheap: options.Cheap = False,
    fail_on: options.FailOn = "never",
    json: options.Json = False,
    html: options.Html = None,
    force: options.Force = False,
) -> None:
    """Tell what changed between two checkpoints of a model, layer by layer, and which looks more tired.

    Drift ‖B−A‖/‖A‖, SFE with the DfI of both, effective ranks, angles between leading singular directions, and the
    verdict on B with A as its reference.

    [bold]Examples[/]

      rekindle compare step-1000.ckpt step-90000.ckpt

      rekindle compare model.safetensors rekindled.safetensors --html report.html
    """
    if html is not None:
        refuse_existing(html, force)
    described_by, planned = options.skeleton(config, model), options.loaded_plan(plan)
    healths, spectra = [], []
    with open_checkpoint(first) as a, open_checkpoint(second) as b:
        listed = [usable(checkpoint, described_by, planned) for checkpoint in (a, b)]
        work = [sum(layer.numbers for layer in layers) for layers in listed]
        with progress(f"comparing {first.name} and {second.name}", 2 * work[0] + work[1]) as advance:
            for checkpoint, layers in zip((a, b), listed, strict=True):
                found = examine(checkpoint, layers, mode="cheap" if cheap else "full", advance=advance)
                healths.append(found.health)
                spectra.append(found.spectra)
            moved = changes(a, b, listed[0], angles=not cheap, advance=advance)
        files = {"source": described(a), "target": described(b)}
        different = differences(a.meta_tensors(), b.meta_tensors())
    if not moved:
        raise ValueError(f"{first} and {second} share no matrix of the same name and shape: not the same model")
    worn = tired(*healths)
    now = healths[1].against(healths[0])
    data = made("compare") | files
    data |= {
        "health": healths[0].to_dict(),
        "after": now.to_dict(),
        "changes": [asdict(change) for change in moved],
        "tired": asdict(worn),
        "differences": different,
        "spectra": {
            name: {"before": spectra[0].get(name), "after": spectra[1].get(name)}
            for name in {**spectra[0], **spectra[1]}
        },
    }
    if html is not None:
        write_page(html, data, force)
    if json:
        show_json(data)
    else:
        show(text(moved, healths, worn, different, now, width()))
    if fail_on != "never" and now.verdict.level >= LEVELS.index(fail_on):
        raise typer.Exit(FINDINGS)


def differences(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Which tensors only one file has, and which differ in shape or dtype."""
    both = [name for name in first if name in second]
    return {
        "only_A": [name for name in first if name not in second],
        "only_B": [name for name in second if name not in first],
        "shape": [name for name in both if first[name].shape != second[name].shape],
        "dtype": [name for name in both if first[name].dtype != second[name].dtype],
    }


def text(
    moved: Sequence[Change],
    healths: Sequence[Health],
    worn: Tired,
    different: Mapping[str, list[str]],
    now: Health,
    columns: int,
) -> str:
    """The comparison for a terminal: a line a layer, then what follows from them."""
    rows = [_cells(change, healths) for change in moved if not change.same]
    same = len(moved) - len(rows)
    drop = (1, *range(len(_HEADINGS) - 1, 5, -1))
    lines = table(_HEADINGS, rows, columns, left=(0, 1, 2), drop=drop) if rows else []
    drifts = [change.drift for change in moved if change.drift is not None]
    lines += ["", f"{len(moved) - same} of {len(moved)} blocks changed, {same} are the same to the bit"]
    if drifts:
        lines.append(f"drift: mean {sum(drifts) / len(drifts):.3g}, largest {max(drifts):.3g}")
    words = {"only_A": "only in A", "only_B": "only in B", "shape": "other shape", "dtype": "other dtype"}
    lines += [f"{words[kind]}: {len(names)} ({', '.join(names[:4])}…)" for kind, names in different.items() if names]
    lines += [f"! {line}" for line in now.verdict.lines()]
    lines += [worn.text, f"verdict: {now.verdict} for B against A ({now.verdict.rule})"]
    return "\n".join(lines)


def _cells(change: Change, healths: Sequence[Health]) -> list[str]:
    first, second = (health.weights.get(change.name, {}) for health in healths)
    numbers: list[Any] = [change.drift, change.sfe]
    for measure in ("dfi_per_dimension", "effective_rank"):
        numbers += [first.get(measure), second.get(measure)]
    numbers += [change.frame, change.angle_out, change.angle_in]
    cells = ["" if number is None else f"{number:.3g}" for number in numbers]
    cells[-2:] = [cell and f"{cell}°" for cell in cells[-2:]]
    return [change.name, change.role, change.shape, *cells]
