"""Options that several commands share, what shells complete them with, and what they stand for.

Nothing here imports torch before an option is used.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rekindle.cli import laboratory_names

if TYPE_CHECKING:
    from torch import nn

    from rekindle.projection.planning import Plan

TARGETS = (
    *("layers", "auto", "all", "attention", "attention.qk", "mlp", "conv", "paper-cnn", "paper-vit", "paper-gpt"),
    *("query", "key", "value", "attention-output", "mlp-in", "mlp-gate", "mlp-out", "depthwise", "head", "embedding"),
)
SCALES = (
    *("auto", "paper", "nearest", "norm", "fan_in", "init:kaiming", "init:xavier", "init:lecun"),
    "init:normal(0.02)",
)
LOSSES = ("cross_entropy", "mse", "model")


def completing(values: Iterable[str]) -> Callable[[str], list[str]]:
    """What a shell offers for a word that has been begun.

    >>> completing(["paper", "nearest"])("pa")
    ['paper']
    """
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


Source = Annotated[
    Path,
    typer.Argument(
        metavar="PATH",
        help="A checkpoint: .safetensors, a Hugging Face folder or index, .pt/.pth/.bin, Lightning .ckpt, DCP folder.",
        show_default=False,
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(help="A config.json or its folder, where none is beside the checkpoint.", show_default=False),
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.py:NAME",
        help="A class or function of yours that builds the model, in a file or a module (package.module:Name): it "
        "shows how tensors are used. Imports and runs that code.",
        show_default=False,
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.py:NAME",
        help="Batches of yours: also measure how far the outputs on them moved. Needs --model.",
        show_default=False,
    ),
]
PlanFile = Annotated[
    Path | None,
    typer.Option(
        "--plan", help="A plan saved from the live model with plan(model, example=batch).save(...).", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout, and nothing else there.")]
Html = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Also write the page: one file, no network.", show_default=False)
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite existing files.")]
Cheap = Annotated[
    bool, typer.Option("--cheap", help="Matrix products only, no eigenvalues: for very large files. No spectra.")
]
FailOn = Annotated[
    Literal["act", "watch", "never"],
    typer.Option(help="Exit with 1 if the verdict is this or worse."),
]
Targets = Annotated[
    list[str] | None,
    typer.Option(
        "--targets",
        "-t",
        help="What to project: layers, auto (the output layers stay), all, attention, attention.qk, mlp, conv, "
        "paper-cnn, paper-vit, paper-gpt, a role, a name or a glob. Repeat for several.  [default: layers]",
        show_default=False,
        autocompletion=completing(TARGETS),
    ),
]
Include = Annotated[
    list[str] | None,
    typer.Option(help="Add names, globs or roles.", show_default=False, autocompletion=completing(TARGETS)),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(help="Leave out names, globs or roles.", show_default=False, autocompletion=completing(TARGETS)),
]
Heads = Annotated[
    list[str] | None, typer.Option(help="Which weights are the output head, instead of a guess.", show_default=False)
]
ScaleRule = Annotated[
    str,
    typer.Option(
        "--scale",
        "-s",
        help="auto (He's norm; the paper's scale where activations are normalized), paper, nearest, norm, fan_in, "
        "init:kaiming, init:normal(0.02), … or a number.",
        autocompletion=completing(SCALES),
    ),
]
ConvRule = Annotated[
    Literal["taps", "flat"], typer.Option(help="A convolution as one matrix per tap, or as one flat matrix.")
]
SplitHeads = Annotated[bool, typer.Option("--split-heads", help="Project each attention head on its own.")]
# As rekindle.engine has it, which would import torch; a test compares the two.
Solver = Literal["auto", "fast", "paper", "svd", "products", "halley", "gram"]


# What options stand for


def architecture(config: Path | None, model: str | None) -> object:
    """What says how tensors are used: the model on the meta device, the config as a dict, or None for the file's own.

    >>> architecture(None, "torch.nn:Identity")
    Identity()
    """
    if config is not None and model is not None:
        raise ValueError("--config and --model both say how tensors are used: give one")
    if config is not None:
        path = config / "config.json" if config.is_dir() else config
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise ValueError(f"{path} holds no JSON object")
        return found
    return built(model, meta=True) if model is not None else None


def built(model: str, *, meta: bool = False) -> nn.Module:
    """The model that a user's function or class makes; on the meta device it has shapes and no numbers."""
    import torch

    build = named(model, "--model", "my_model.py:build")
    with torch.device("meta" if meta else "cpu"):
        made = build if isinstance(build, torch.nn.Module) else build()
    if not isinstance(made, torch.nn.Module):
        raise ValueError(f"--model {model}: gave a {type(made).__name__}, not a torch.nn.Module")
    return made


def batches(data: str) -> Any:
    """The batches that a user's name stands for: a function is called, anything else is taken as it is."""
    found = named(data, "--data", "my_data.py:batches")
    return listed_batches(found, f"--data {data}")


def listed_batches(found: object, where: str) -> Any:
    """Batches that can be read again; a function is called for them.

    >>> listed_batches(lambda: iter([1, 2]), "mine.py: batches")
    [1, 2]
    """
    made = found() if callable(found) and not hasattr(found, "__iter__") else found
    if not hasattr(made, "__iter__"):
        raise ValueError(f"{where}: gave a {type(made).__name__}, which holds no batches")
    return made if iter(made) is not made else list(made)


def loss(name: str | None) -> Any:
    """A loss(model, batch): one of `LOSSES`, or a user's own function.

    >>> loss(None) is None, loss("model").__name__
    (True, '_own_loss')
    """
    if name is None:
        return None
    if name == "model":
        return _own_loss
    if name in LOSSES:
        from torch.nn import functional

        measured = functional.cross_entropy if name == "cross_entropy" else functional.mse_loss
        return lambda model, batch: measured(model(batch[0]), batch[1])
    return named(name, "--loss", f"one of {', '.join(LOSSES)}, or my_loss.py:loss")


def _own_loss(model: nn.Module, batch: Any) -> object:
    """What a transformers model computes itself."""
    return model(**batch).loss


def named(reference: str, option: str, example: str) -> Any:
    """What a user's "file.py:name" or "package.module:name" stands for; errors inside that code are the user's.

    >>> named("math:pi", "--model", "m.py:build")
    3.141592653589793
    """
    module, _, name = reference.rpartition(":")
    if not module or not name:
        raise ValueError(f"{option} {reference!r}: write it as FILE.py:NAME or MODULE:NAME, such as {example}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` has it
    file = Path(module)
    try:
        if file.suffix == ".py":
            if not file.is_file():
                raise ValueError(f"{option} {reference}: there is no file {file}")
            found = run_file(file)
        else:
            found = importlib.import_module(module)
    except ImportError as error:
        if getattr(error, "name", None) in (module, module.partition(".")[0]):
            raise ValueError(f"{option} {reference}: there is no module {error.name!r} here") from error
        raise ValueError(f"{option} {reference}: {module} cannot be imported: {error}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{option} {reference}: {module} has no {part!r}")
        found = getattr(found, part)
    return found


def run_file(file: Path) -> object:
    """A user's file, run: its module. Its own folder comes first, as if it had been started from there."""
    if not file.is_file():
        raise ValueError(f"there is no file {file}")
    sys.path.insert(0, str(file.resolve().parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def loaded_plan(path: Path | None) -> Plan | None:
    """The plan in a file, or None; a file that is none is one clear error.

    >>> loaded_plan(None) is None
    True
    """
    if path is None:
        return None
    from rekindle.projection.planning import Plan

    try:
        return Plan.load(path)
    except OSError:
        raise
    except Exception as error:  # whatever an unrelated JSON file makes the reader raise
        raise ValueError(f"{path} is not a plan saved by rekindle: {error}") from error


def planning(
    targets: list[str] | None,
    include: list[str] | None,
    exclude: list[str] | None,
    heads: list[str] | None,
    scale: str,
    conv: str,
    split_heads: bool,
) -> dict[str, Any]:
    """The options of a plan as keywords of `rekindle.plan`.

    >>> planning(None, None, ["mlp"], None, "norm", "taps", False)["exclude"]
    ('mlp',)
    """
    return {
        "targets": tuple(targets) if targets and len(targets) > 1 else targets[0] if targets else "layers",
        "include": tuple(include or ()),
        "exclude": tuple(exclude or ()),
        "heads": tuple(heads) if heads else None,
        "scale": scale,
        "conv": conv,
        "split_heads": split_heads,
    }


# Names of the laboratory


def complete_settings(incomplete: str) -> list[str]:
    """Settings by name; where none fits, the shell offers files."""
    return completing(laboratory_names.SETTINGS)(incomplete)


def complete_arms(incomplete: str) -> list[str]:
    """The last of several arms with commas."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{each}" for each in completing([*laboratory_names.ARMS, *laboratory_names.GROUPS])(last)]


def complete_data(incomplete: str) -> list[str]:
    """Data sets by name."""
    return completing(laboratory_names.DATA)(incomplete)
