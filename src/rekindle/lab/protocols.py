"""The named settings: what settings.toml lists, and the paper's vision protocols and GPT with their coefficients."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Fields = dict[str, Any]
"""The fields of one `Setting`."""

# The columns of the paper's table: which coefficient each method has in each of its protocols.
_COLUMNS = {
    "dash": ("alpha", "lam"),
    "parseval": ("coefficient",),
    "l2-init": ("coefficient",),
    "continual-backprop": ("replacement_rate", "maturity_threshold"),
    "redo": ("tau",),
    "self-normalized-reset": ("percentile",),
}
_TABLE: dict[tuple[str, str], tuple[tuple[float, ...], ...]] = {
    ("warm-start", "resnet18"): ((0.3, 0.05), (1e-3,), (1e-3,), (1e-4, 1000), (0.5,), (0.99,)),
    ("warm-start", "vit"): ((0.1, 0.05), (1e-5,), (1e-3,), (1e-4, 100), (0.5,), (0.99,)),
    ("warm-start", "vgg16"): ((0.1, 0.05), (1e-3,), (1e-3,), (1e-4, 1000), (0.5,), (0.92,)),
    ("continual", "resnet18"): ((0.3, 0.05), (1e-3,), (1e-5,), (1e-5, 1000), (0.05,), (0.92,)),
    ("continual", "vit"): ((0.1, 0.05), (1e-5,), (1e-4,), (1e-5, 1000), (0.01,), (0.96,)),
    ("continual", "vgg16"): ((0.1, 0.1), (1e-4,), (1e-5,), (1e-5, 1000), (0.01,), (0.99,)),
    ("class-incremental", "vit"): ((0.3, 0.3), (1e-5,), (1e-5,), (1e-5, 1000), (0.01,), (0.92,)),
    ("class-incremental", "vgg16"): ((0.3, 0.1), (1e-3,), (1e-4,), (1e-4, 1000), (0.05,), (0.98,)),
}
_DATA = {"resnet18": "cifar-10", "vit": "cifar-100", "vgg16": "tiny-imagenet"}
_LENGTH: dict[str, Mapping[str, Any]] = {
    "warm-start": {"share": 0.1, "first_epochs": 1000, "epochs": 100},
    "continual": {"chunks": 10, "epochs": 100},
    "class-incremental": {"phases": 20, "epochs": 100},
}
_MATRIX_ARMS = (
    *("fire", "fire-10", "fire-5", "fire-nearest", "fire-norm", "fire-init"),
    *("random-isometry", "random-isometry-nearest", "rescale", "fresh-at-norm"),
    *("fire-state-fresh", "fire-state-moments", "fire-state-step", "fire-state-none"),
)


def coefficients(stream: str, network: str) -> dict[str, dict[str, Any]]:
    """The options that the paper gives each method in one of its vision protocols."""
    found: dict[str, dict[str, Any]] = {"shrink-perturb": {"coefficient": 0.8}}
    for (method, names), values in zip(_COLUMNS.items(), _TABLE[stream, network], strict=True):
        found[method] = dict(zip(names, values, strict=True))
    # What the paper's code calls by these names: half of the squared distance, and every layer with its norms.
    found["l2-init"]["coefficient"] /= 2
    found["parseval"] |= {"norms": True, "targets": "layers"}
    return found


def touching(targets: list[str]) -> dict[str, dict[str, Any]]:
    """Coefficients with which FIRE and its controls all change the same matrices, at the paper's scale."""
    norms = {name: {} if name == "fresh-at-norm" else {"scale": "paper"} for name in _MATRIX_ARMS}
    return {name: {"targets": targets, **norm} for name, norm in norms.items()}


def _vision(stream: str, network: str) -> Fields:
    # Of a ViT the paper projects the queries and keys, of the others every layer.
    targets = ["attention.qk"] if network == "vit" else ["auto", "head"]
    return {
        "name": f"paper/{stream}-{network}",
        "stream": stream,
        "network": network,
        "stream_options": {"data": _DATA[network], **_LENGTH[stream]},
        "batch": 256,
        "clip": 0.5,
        "warmup": 0.1,
        "headline": "test_accuracy",
        "last": 1,
        "evaluate": 10_000,
        "spare_first": stream == "warm-start",
        "coefficients": coefficients(stream, network) | touching(targets),
        "about": f"the paper's {stream} on {_DATA[network]}; for a GPU, not run here as a whole",
    }


_TEXTS = ["hf:Salesforce/wikitext:wikitext-103-raw-v1", "hf:Skylion007/openwebtext"]
_GPT: Fields = {
    "name": "paper/gpt",
    "stream": "domains",
    "network": "gpt",
    "stream_options": {"data": _TEXTS, "tokens": 50257, "context": 1024, "steps": 10_000},
    "network_options": {"layers": 12, "width": 768, "heads": 12},
    "batch": 480,
    "optimizer": "adamw",
    "lr": 6e-4,
    "optimizer_options": {"betas": [0.9, 0.95], "weight_decay": 0.1},
    "clip": 1.0,
    "warmup": 0.02,
    "schedule": "cosine",
    "coefficients": touching(["paper-gpt"]),
    "headline": "test_loss",
    "last": 1,
    "replay": 1.0,
    "evaluate": 200,
    "about": "GPT-0.1B on WikiText-103, then OpenWebText with WikiText; steps and warm-up are ours, for a cluster",
}


def over(base: Mapping[str, Any], fields: Mapping[str, Any]) -> Fields:
    """The fields of a setting with others in their place; groups of options are merged.

    >>> over({"lr": 0.1, "stream_options": {"tasks": 3, "epochs": 2}}, {"stream_options": {"tasks": 4}})
    {'lr': 0.1, 'stream_options': {'tasks': 4, 'epochs': 2}}
    """
    merged = {n: {**base[n], **each} if isinstance(base.get(n), Mapping) else each for n, each in fields.items()}
    return {**base, **merged}


def named() -> list[Fields]:
    """The fields of every named setting: laptop sizes first, then the paper's."""
    found: dict[str, Fields] = {}
    with (Path(__file__).parent / "settings.toml").open("rb") as file:
        for name, fields in tomllib.load(file).items():
            found[name] = over(found.get(fields.pop("base", ""), {}), {"name": name, **fields})
    paper = [each for name, each in found.items() if name.startswith("paper/")]
    here = [each for name, each in found.items() if not name.startswith("paper/")]
    return [*here, *(_vision(*each) for each in _TABLE), _GPT, *paper]
