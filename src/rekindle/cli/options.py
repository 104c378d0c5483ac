"""Options that several commands share, and what they stand for."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from torch import nn

from rekindle.projection.planning import Plan

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
    typer.Option(help="A config.json or its folder, where none lies beside the checkpoint.", show_default=False),
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:NAME",
        help="A class or function of yours that builds the model (without weights): it shows how tensors are used. "
        "Imports and runs that code.",
        show_default=False,
    ),
]
PlanFile = Annotated[
    Path | None,
    typer.Option("--plan", help="A plan saved from the live model with plan(model).save(...).", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout, and nothing else there.")]
Html = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Also write the page: one file, no network.", show_default=False)
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite files that are there.")]
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
        help="What to project: auto, all, attention, attention.qk, mlp, conv, paper-cnn, paper-vit, paper-gpt, a role, "
        "a name or a glob. Repeat for several.  [default: auto]",
        show_default=False,
    ),
]
Include = Annotated[list[str] | None, typer.Option(help="Add names, globs or roles.", show_default=False)]
Exclude = Annotated[list[str] | None, typer.Option(help="Leave out names, globs or roles.", show_default=False)]
Heads = Annotated[
    list[str] | None, typer.Option(help="Which weights are the output head, instead of a guess.", show_default=False)
]
ScaleRule = Annotated[
    str,
    typer.Option("--scale", "-s", help="paper, nearest, norm, fan_in, init:kaiming, init:normal(0.02), … or a number."),
]
ConvRule = Annotated[
    Literal["taps", "flat"], typer.Option(help="A convolution as one matrix a tap, or as one flat matrix.")
]
SplitHeads = Annotated[bool, typer.Option("--split-heads", help="Project each attention head on its own.")]


def skeleton(config: Path | None, model: str | None) -> Any:
    """What says how tensors are used: the model on the meta device, the config as a dict, or None for the file's own.

    >>> skeleton(None, "torch.nn:Identity")
    Identity()
    """
    if config is not None and model is not None:
        raise ValueError("--config and --model both say how tensors are used: give one")
    if config is not None:
        path = config / "config.json" if config.is_dir() else config
        try:
            found = json.loads(path.read_text())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is no JSON: {error}") from None
        if not isinstance(found, dict):
            raise ValueError(f"{path} holds no JSON object")
        return found
    return _built(model) if model is not None else None


def _built(model: str) -> nn.Module:
    module, _, name = model.partition(":")
    if not module or not name:
        raise ValueError(f"--model {model!r}: write it as MODULE:NAME, such as torchvision.models:resnet18")
    try:
        build: Any = importlib.import_module(module)
        for part in name.split("."):
            build = getattr(build, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--model {model}: {error}") from error
    with torch.device("meta"):
        built = build()
    if not isinstance(built, nn.Module):
        raise ValueError(f"--model {model}: gave a {type(built).__name__}, no torch.nn.Module")
    return built


def loaded_plan(path: Path | None) -> Plan | None:
    """The plan in a file, or None; a file that is none is one clear error.

    >>> loaded_plan(None) is None
    True
    """
    if path is None:
        return None
    try:
        return Plan.load(path)
    except OSError:
        raise
    except Exception as error:  # whatever a foreign JSON makes the reader stumble over
        raise ValueError(f"{path} is no plan saved by rekindle: {error}") from error


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
        "targets": tuple(targets) if targets and len(targets) > 1 else targets[0] if targets else "auto",
        "include": tuple(include or ()),
        "exclude": tuple(exclude or ()),
        "heads": tuple(heads) if heads else None,
        "scale": scale,
        "conv": conv,
        "split_heads": split_heads,
    }
