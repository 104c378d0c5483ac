"""`rekindle inspect`: the health of a checkpoint; `rekindle compare`: what changed between two."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rekindle.cli import options
from rekindle.cli.page import described, made, write_page
from rekindle.cli.terminal import (
    FINDINGS,
    as_options,
    note,
    progress,
    refuse_existing,
    reported,
    show,
    show_json,
    width,
)
from rekindle.report.view import MOVED, how_far
from rekindle.report.words import plural

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rekindle.checkpoint import Checkpoint
    from rekindle.cli.weights import BlockChange, FileHealth, MoreSigns, StoredTensor
    from rekindle.diagnosis.examination import Health
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
    found, facts = examined(path, described_by, planned, cheap=cheap)
    health = found.health if data is None else _at_work(path, str(model), data, loss, cheap)
    if reference is not None:
        if data is None:
            earlier = examined(reference, described_by, planned, cheap=cheap)[0].health
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

        show(health_text(health, width(), following, as_options))
    _exit_on(fail_on, health)


def examined(
    path: Path, config: object, plan: Plan | None, *, cheap: bool = False, what: str = "measuring"
) -> tuple[FileHealth, dict[str, Any]]:
    """The health of one file with its progress on the terminal, and what the file is."""
    from rekindle.checkpoint import open_checkpoint
    from rekindle.cli.weights import examine

    with open_checkpoint(path) as checkpoint:
        layers = usable(checkpoint, config, plan)
        with progress(f"{what} {path.name}", sum(layer.numbers for layer in layers)) as advance:
            found = examine(checkpoint, layers, mode="cheap" if cheap else "full", advance=advance)
        return found, {"source": described(checkpoint)}


def usable(checkpoint: Checkpoint, config: object, plan: Plan | None) -> list[StoredTensor]:
    """The tensors of a file; a file without any certain matrix is an error that says what to pass."""
    from rekindle.cli.weights import layers_of

    layers, remark = layers_of(checkpoint, config, plan)
    if remark:
        note(remark)
    if not any(layer.reason is None for layer in layers):
        reasons = sorted({layer.reason for layer in layers if layer.reason and len(layer.shape) > 1})
        why = f": {'; '.join(reasons[:3])}" if reasons else ""
        raise ValueError(
            f"{checkpoint.path} holds {len(layers)} tensors and no matrix that can be measured{why}. "
            "--config, --model or --plan tell how tensors are used"
        )
    unsure = sum(layer.reason is not None and "state dict alone" in layer.reason for layer in layers)
    assumed = sum(layer.assumed for layer in layers)
    if assumed:
        note(f"{plural(assumed, 'convolution')} read with groups=1: --model or --plan tell otherwise")
    if unsure:
        note(f"{plural(unsure, 'tensor')} skipped; --config, --model or --plan tell how they are used")
    return layers


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
        output = shlex.quote(str(path.with_name(f"{path.stem}-rekindled{path.suffix}")))
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
    from rekindle.checkpoint import open_checkpoint
    from rekindle.cli.weights import changes, examine, more_signs

    if html is not None:
        refuse_existing(html, force, first, second, plan, config)
    described_by, planned = options.architecture(config, model), options.loaded_plan(plan)
    answered = answers(first, model, data), answers(second, model, data)
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
    signs = more_signs(*healths)
    now = healths[1].against(healths[0])
    facts = made("compare") | files
    facts |= {
        "outputs_moved": moved_by(*answered),
        "health": healths[0].to_dict(),
        "after": now.to_dict(),
        "changes": [asdict(change) for change in moved],
        "tired": asdict(signs),
        "differences": different,
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
        show(text(moved, healths, signs, different, now, width(), facts["outputs_moved"]))
    _exit_on(fail_on, now)


def moved_by(before: list[Tensor] | None, after: list[Tensor] | None) -> float | None:
    """‖after − before‖ ÷ ‖before‖ of outputs, None where they were not measured.

    >>> moved_by(None, None)
    """
    if before is None or after is None:
        return None
    from rekindle.isolation import relative_change

    return relative_change(before, after)


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
    moved: Sequence[BlockChange],
    healths: Sequence[Health],
    signs: MoreSigns,
    different: Mapping[str, list[str]],
    now: Health,
    columns: int,
    outputs_moved: float | None = None,
) -> str:
    """The comparison for a terminal: a line per layer, then what follows from them."""
    from rekindle.tables import table, wrapped

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
    said += [signs.text, f"verdict: {now.verdict} for B against A ({now.verdict.rule})"]
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
