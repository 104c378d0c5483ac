"""`rekindle inspect`: the health of a checkpoint; `rekindle compare`: what changed between two."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rekindle.cli import options
from rekindle.cli.page import made, write_page
from rekindle.cli.terminal import (
    FINDINGS,
    note,
    refuse_existing,
    reported,
    share,
    show,
    show_json,
    width,
)
from rekindle.report.view import MOVED, how_far

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rekindle.checkpoint import FileComparison, FileHealth
    from rekindle.checkpoint.comparison import BlockChange
    from rekindle.diagnosis.examination import Health
    from rekindle.measures.matrices import Mode
    from rekindle.projection.planning import Plan

_HEADINGS = ("layer", "role", "shape", "drift", "SFE", "DfI/k A", "→ B", "eff. rank A", "→ B", "frame", "∠ out", "∠ in")


@reported
def inspect(
    path: options.Source,
    config: options.Config = None,
    model: options.Model = None,
    plan: options.PlanFile = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:NAME",
            help="Batches of yours (or a function that gives them): activity is measured too. Needs --model.",
            show_default=False,
        ),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.py:NAME",
            help="cross_entropy, mse, model (its own), or a loss(model, batch) of yours: gradients are measured too.",
            show_default=False,
            autocompletion=options.completing(options.LOSSES),
        ),
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(help="An earlier checkpoint of the same model: raises the confidence.", show_default=False),
    ] = None,
    cheap: options.Cheap = False,
    headers: Annotated[
        bool, typer.Option("--headers", help="Names, shapes and layouts only: no weight is read, nothing is judged.")
    ] = False,
    fail_on: options.FailOn = "never",
    json: options.Json = False,
    html: options.Html = None,
    force: options.Force = False,
) -> None:
    """Measure the health of every weight matrix of a checkpoint, and give a verdict.

    Spectra, ranks, deviation from isometry (DfI), zero and similar neurons, from the weights alone and one tensor in
    memory at a time. With --model and --data also what the neurons do: dormancy, feature ranks, gradients. Nothing is
    changed.

    [bold]Examples[/]

      rekindle inspect model.safetensors

      rekindle inspect ./my-model --html report.html

      rekindle inspect hf://owner/name --headers

      rekindle inspect model.pt --model my_model.py:build --data my_data.py:batches --loss cross_entropy

      rekindle inspect last.ckpt --reference first.ckpt --fail-on act
    """
    if html is not None:
        refuse_existing(html, force, path, reference, plan, config)
    if (data or loss) and not model:
        raise ValueError("--data and --loss need --model FILE.py:NAME, the model that runs on the batches")
    if loss and not data:
        raise ValueError("--loss needs --data FILE.py:NAME: gradients need batches")
    described_by, planned = options.architecture(config, model), options.loaded_plan(plan)
    if headers:
        _list(path, described_by, planned, json)
        return
    found = examined(path, described_by, planned, cheap=cheap)
    facts: dict[str, Any] = {"source": found.source}
    health = found.health if data is None else _at_work(path, str(model), data, loss, cheap)
    if reference is not None:
        if data is None:
            earlier = examined(reference, described_by, planned, cheap=cheap).health
        else:
            earlier = _at_work(reference, str(model), data, loss, cheap)
        health = health.against(earlier)
        facts["reference"] = str(reference)
    spectra = {name: {"before": curve} for name, curve in found.spectra.items()}
    following = _next(path, health, model, data)
    facts |= made("inspect") | {"health": health.to_dict(), "spectra": spectra, "next": following}
    if html is not None:
        write_page(html, facts, force)
    if json:
        show_json(facts)
    else:
        from rekindle.diagnosis.results import described as health_text

        show(health_text(health, width(), following))
    _exit_on(fail_on, health)


def examined(path: Path, config: object, plan: Plan | None, *, cheap: bool = False) -> FileHealth:
    """The health of one file, with its progress and remarks on the terminal."""
    from rekindle.checkpoint import inspect_file

    with share(f"measuring {path.name}") as tell:
        found = inspect_file(path, config=config, plan=plan, mode="cheap" if cheap else "full", progress=tell)
    for remark in found.remarks:
        note(remark)
    return found


def _list(path: Path, config: object, plan: Plan | None, json: bool) -> None:
    """What the headers of a file say."""
    from rekindle.checkpoint import open_checkpoint
    from rekindle.checkpoint.inspection import described, layers_of
    from rekindle.tables import table

    with open_checkpoint(path) as checkpoint:
        layers, remark = layers_of(checkpoint, config, plan)
        source = described(checkpoint)
        dtypes = {layer.key: str(checkpoint.meta(layer.key).dtype).removeprefix("torch.") for layer in layers}
    if remark:
        note(remark)
    rows = []
    for layer in layers:
        blocks = ", ".join(f"{block.count} × {block.out}×{block.in_}" for block in layer.blocks)
        role = ", ".join(dict.fromkeys(block.role for block in layer.blocks))
        shape = "×".join(map(str, layer.shape))
        rows.append([layer.name, shape, dtypes[layer.key], role, blocks if layer.reason is None else layer.reason])
    headings = ("tensor", "shape", "dtype", "role", "matrices")
    if json:
        tensors = [dict(zip(headings, row, strict=True)) for row in rows]
        show_json(made("inspect") | {"source": source, "headers": tensors})
        return
    lines = table(headings, rows, width(), left=range(len(headings)), drop=(3,))
    numbers = f"{source['tensors']} tensors, {source['numbers']:,} numbers, {source['bytes']:,} bytes"
    show("\n".join([*lines, "", numbers]))


def _at_work(path: Path, model: str, data: str, loss: str | None, cheap: bool) -> Health:
    """The health of the live model with the file's weights on the user's batches."""
    from rekindle.diagnosis.examination import health

    live = loaded(path, model)
    return health(live, options.batches(data), loss=options.loss(loss), mode="cheap" if cheap else "full")


def loaded(path: Path, model: str) -> nn.Module:
    """The user's model with the weights of a file; names of wrappers and one prefix for all are removed."""
    from rekindle.blocks.names import state_cleaner
    from rekindle.checkpoint import open_checkpoint

    live = options.built(model)
    with open_checkpoint(path) as checkpoint:
        clean = state_cleaner(checkpoint.names)
        state = {clean(name): checkpoint.read(name) for name in checkpoint.names}
    wanted = list(live.state_dict())
    if wanted and wanted[0] not in state:
        ends = (name.removesuffix(wanted[0]) for name in state if name.endswith(f".{wanted[0]}"))
        prefix = next((each for each in ends if all(each + name in state for name in wanted)), None)
        if prefix is not None:
            state = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    try:
        live.load_state_dict(state)
    except RuntimeError as error:
        first = " ".join(str(error).split())[:300]
        raise ValueError(f"{path} does not fit --model {model}: {first}") from None
    return live


def answers(path: Path, model: str | None, data: str | None) -> list[Tensor] | None:
    """The outputs of the model with a file's weights on the user's batches; None without batches."""
    if data is None:
        return None
    if model is None:
        raise ValueError("--data needs --model FILE.py:NAME, the model that runs on the batches")
    from rekindle.isolation import outputs

    return outputs(loaded(path, model), options.batches(data))


def _next(path: Path, health: Health, model: str | None, data: str | None) -> str:
    """The command that follows from the verdict."""
    file = shlex.quote(str(path))
    more = f" --model {shlex.quote(model)}" if model else ""
    signs = health.verdict.signs_to_act()
    if "broken values" in signs:
        return "restore an earlier checkpoint"
    if signs == {"dormancy"}:  # a projection of weights alone leaves neurons dead that are dead by their bias
        output = shlex.quote(str(path.with_name(f"{path.stem}-fire{path.suffix}")))
        return f"rekindle fire {file}{more} -o {output} --biases zero"
    if health.verdict in ("watch", "act"):
        return f"rekindle plan {file}{more}"
    if data is None:
        return f"rekindle inspect {file} --model {shlex.quote(model or 'my_model.py:build')} --data my_data.py:batches"
    return "nothing to do; inspect again after more training, with --reference " + file


def _exit_on(fail_on: str, health: Health) -> None:
    from rekindle.diagnosis.verdict import LEVELS

    if fail_on != "never" and health.verdict.level >= LEVELS.index(fail_on):
        raise typer.Exit(FINDINGS)


@reported
def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="The earlier checkpoint.", show_default=False)],
    second: Annotated[Path, typer.Argument(metavar="B", help="The later one.", show_default=False)],
    config: options.Config = None,
    model: options.Model = None,
    plan: options.PlanFile = None,
    data: options.Data = None,
    cheap: options.Cheap = False,
    fail_on: options.FailOn = "never",
    json: options.Json = False,
    html: options.Html = None,
    force: options.Force = False,
) -> None:
    """Show what changed between two checkpoints, layer by layer, and which shows more signs of lost plasticity.

    Drift ‖B−A‖/‖A‖, SFE with the DfI of both, effective ranks, angles between leading singular directions, and the
    verdict on B with A as its reference.

    [bold]Examples[/]

      rekindle compare step-1000.ckpt step-90000.ckpt

      rekindle compare model.safetensors rekindled.safetensors --html report.html

      rekindle compare a.pt b.pt --model my_model.py:build --data my_data.py:batches
    """
    from rekindle.checkpoint import compare_files

    if html is not None:
        refuse_existing(html, force, first, second, plan, config)
    described_by, planned = options.architecture(config, model), options.loaded_plan(plan)
    answered = answers(first, model, data), answers(second, model, data)
    mode: Mode = "cheap" if cheap else "full"
    with share(f"comparing {first.name} and {second.name}") as tell:
        found = compare_files(first, second, config=described_by, plan=planned, mode=mode, progress=tell)
    for remark in found.first.remarks:
        note(remark)
    spectra, now = (found.first.spectra, found.second.spectra), found.health
    facts = made("compare") | {"source": found.first.source, "target": found.second.source}
    facts |= {
        "outputs_moved": moved_by(*answered),
        "health": found.first.health.to_dict(),
        "after": now.to_dict(),
        "changes": [asdict(change) for change in found.changes],
        "tired": asdict(found.signs),
        "differences": found.differences,
        "spectra": {
            name: {"before": spectra[0].get(name), "after": spectra[1].get(name)}
            for name in {**spectra[0], **spectra[1]}
        },
    }
    if html is not None:
        write_page(html, facts, force)
    if json:
        show_json(facts)
    else:
        show(text(found, width(), facts["outputs_moved"]))
    _exit_on(fail_on, now)


def moved_by(before: list[Tensor] | None, after: list[Tensor] | None) -> float | None:
    """‖after − before‖ ÷ ‖before‖ of outputs, None where they were not measured.

    >>> moved_by(None, None)
    """
    if before is None or after is None:
        return None
    from rekindle.isolation import relative_change

    return relative_change(before, after)


def text(found: FileComparison, columns: int, outputs_moved: float | None = None) -> str:
    """The comparison for a terminal: a line per layer, then what follows from them."""
    from rekindle.tables import table, wrapped

    moved, now, different = found.changes, found.health, found.differences
    healths = (found.first.health, found.second.health)
    rows = [_cells(change, healths) for change in moved if not change.same]
    same = sum(change.same for change in moved)
    drop = (1, *range(len(_HEADINGS) - 1, 4, -1))
    lines = table(_HEADINGS, rows, columns, left=(0, 1, 2), drop=drop) if rows else []
    drifts = [change.drift for change in moved if change.drift is not None]
    said = [f"{len(moved) - same} of {len(moved)} blocks changed, {same} identical bit for bit"]
    if drifts:
        said.append(f"drift: mean {sum(drifts) / len(drifts):.3g}, largest {max(drifts):.3g}")
    if rows:
        said += [how_far(outputs_moved), f"if nothing was trained between A and B, {MOVED}"]
    words = {"only_A": "only in A", "only_B": "only in B", "shape": "other shape", "dtype": "other dtype"}
    said += [f"{words[kind]}: {len(names)} ({', '.join(names[:4])}…)" for kind, names in different.items() if names]
    said += [f"! {line}" for line in now.verdict.lines()]
    said += [found.signs.text, f"verdict: {now.verdict} for B against A ({now.verdict.rule})"]
    return "\n".join([*lines, "", *(part for sentence in said for part in wrapped(sentence, columns))])


def _cells(change: BlockChange, healths: Sequence[Health]) -> list[str]:
    first, second = (health.weights.get(change.name, {}) for health in healths)
    numbers: list[Any] = [change.drift, change.sfe]
    for measure in ("dfi_per_dimension", "effective_rank"):
        numbers += [first.get(measure), second.get(measure)]
    numbers += [change.frame, change.angle_out, change.angle_in]
    cells = ["" if number is None else f"{number:.3g}" for number in numbers]
    cells[-2:] = [cell and f"{cell}°" for cell in cells[-2:]]
    return [change.name, change.role, change.shape, *cells]
