"""The named settings: sizes that finish on a laptop, and the paper's own protocols.

Laptop sizes are those at which plasticity was seen to be lost (or, where a stream is a control, not to be). The
paper's have its optimizer, batch, clipping, warm-up and per-method coefficients. Here they are plain fields;
`rekindle.lab.settings` makes a `Setting` of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rekindle.lab.agents import presets

Fields = dict[str, Any]
"""The fields of one `Setting`."""

_MLP = {"width": [128, 128, 128]}
_VIT = {"patch": 4, "layers": 3, "width": 48, "heads": 4}
_GPT = {"layers": 2, "width": 64, "heads": 4, "tied": False}
_VISION: dict[str, Any] = {"clip": 0.5, "warmup": 0.1, "headline": "test_accuracy"}
_CIFAR = {"data": "cifar-10", "size": 16, "test_count": 2000}
# One run of `nothing` on one core of an AMD EPYC (family 25, model 17), from the CPU time of its first tasks where
# there are many; replayed data grow with the tasks. Arms that act at every step take longer.
_TIMES = {
    "digits": "10 s",
    "random-labels": "30 s",
    "random-labels+replay": "50 s",
    "random-labels+state": "30 s",
    "permuted-inputs": "30 s",
    "permuted-inputs+replay": "1 min",
    "label-shift": "12 s",
    "drift": "12 s",
    "drift+replay": "20 s",
    "warm-start": "3 min",
    "continual": "2 min",
    "class-incremental": "4 min",
    "alphabet": "2 min",
    "alphabet+replay": "3 min",
    "alphabet+state": "2 min",
    "domains": "2 min",
    "domains+replay": "2 min",
    "domains+state": "2 min",
}


def _setting(
    name: str,
    stream: str,
    network: str,
    stream_options: Mapping[str, Any],
    network_options: Mapping[str, Any] | None = None,
    **others: Any,
) -> Fields:
    own = {"name": name, "stream": stream, "network": network, "stream_options": dict(stream_options)}
    return {**own, "network_options": dict(network_options or {}), **others}


def _laptop() -> list[Fields]:
    return [
        _setting(
            "digits",
            "random-labels",
            "mlp",
            {"data": "digits", "count": 500, "tasks": 14, "epochs": 25},
            {"width": [100, 100, 100]},
            batch=16,
            lr=3e-3,
            about="the demo: 500 small digits learned by heart with new labels, 14 times",
        ),
        _setting(
            "random-labels",
            "random-labels",
            "mlp",
            {"data": "fashion-mnist", "count": 1600, "tasks": 15, "epochs": 30},
            _MLP,
            batch=32,
            about="1,600 Fashion-MNIST images learned by heart with new labels, 15 times",
        ),
        _setting(
            "permuted-inputs",
            "permuted-inputs",
            "mlp",
            {"data": "fashion-mnist", "count": 5000, "test_count": 2000, "tasks": 25, "epochs": 5},
            _MLP,
            batch=32,
            headline="test_accuracy",
            last=5,
            about="Fashion-MNIST with its pixels in a new order, 25 times",
        ),
        _setting(
            "label-shift",
            "label-shift",
            "mlp",
            {"data": "fashion-mnist", "count": 5000, "test_count": 2000, "per_task": 2000, "tasks": 15, "epochs": 8},
            _MLP,
            batch=32,
            headline="test_accuracy",
            last=5,
            about="Fashion-MNIST, where the classes become rare and frequent in turn",
        ),
        _setting(
            "drift",
            "drift",
            "mlp",
            {"data": ["mnist", "fashion-mnist"], "test_count": 2000, "per_task": 2000, "tasks": 12, "epochs": 10},
            _MLP,
            batch=32,
            headline="test_accuracy",
            last=4,
            about="from MNIST to Fashion-MNIST and back",
        ),
        _setting(
            "warm-start",
            "warm-start",
            "resnet18",
            {**_CIFAR, "count": 10000, "share": 0.1, "first_epochs": 200, "epochs": 15},
            {"width": 8},
            last=1,
            about="a tenth of 10,000 CIFAR-10 images (16×16) for 200 epochs, then all of them for 15",
            **_VISION,
        ),
        _setting(
            "continual",
            "continual",
            "resnet18",
            {**_CIFAR, "count": 4000, "chunks": 10, "epochs": 10},
            {"width": 8},
            about="4,000 CIFAR-10 images (16×16) that arrive in ten chunks",
            **_VISION,
        ),
        _setting(
            "class-incremental",
            "class-incremental",
            "vit",
            {**_CIFAR, "per_class": 500, "epochs": 20},
            _VIT,
            about="CIFAR-10 (16×16), one more class in each phase",
            **_VISION,
        ),
        _setting(
            "alphabet",
            "alphabet",
            "gpt",
            {"data": "shakespeare", "length": 1_000_000, "context": 32, "tasks": 30, "steps": 300},
            _GPT,
            batch=16,
            optimizer="adamw",
            lr=1e-2,
            headline="online_loss",
            evaluate=300,
            about="Shakespeare in a new alphabet, 30 times",
        ),
        _setting(
            "domains",
            "domains",
            "gpt",
            {"data": ["shakespeare", "python", "bible"], "length": 4_000_000, "context": 64, "steps": 1500},
            _GPT,
            batch=16,
            optimizer="adamw",
            lr=2e-3,
            warmup=0.05,
            clip=1.0,
            headline="test_loss",
            last=2,
            evaluate=300,
            about="Shakespeare, then Python source, then the Bible, as bytes",
        ),
    ]


# The columns of the paper's table: which coefficient each method has in each of its protocols.
_METHODS = ("dash", "parseval", "l2-init", "continual-backprop", "redo", "self-normalized-reset")
_TABLE: dict[tuple[str, str], tuple[Any, ...]] = {
    ("warm-start", "resnet18"): ((0.3, 0.05), 1e-3, 1e-3, (1e-4, 1000), 0.5, 0.99),
    ("warm-start", "vit"): ((0.1, 0.05), 1e-5, 1e-3, (1e-4, 100), 0.5, 0.99),
    ("warm-start", "vgg16"): ((0.1, 0.05), 1e-3, 1e-3, (1e-4, 1000), 0.5, 0.92),
    ("continual", "resnet18"): ((0.3, 0.05), 1e-3, 1e-5, (1e-5, 1000), 0.05, 0.92),
    ("continual", "vit"): ((0.1, 0.05), 1e-5, 1e-4, (1e-5, 1000), 0.01, 0.96),
    ("continual", "vgg16"): ((0.1, 0.1), 1e-4, 1e-5, (1e-5, 1000), 0.01, 0.99),
    ("class-incremental", "vit"): ((0.3, 0.3), 1e-5, 1e-5, (1e-5, 1000), 0.01, 0.92),
    ("class-incremental", "vgg16"): ((0.3, 0.1), 1e-3, 1e-4, (1e-4, 1000), 0.05, 0.98),
}
_DATA = {"resnet18": "cifar-10", "vit": "cifar-100", "vgg16": "tiny-imagenet"}
_LENGTH: dict[str, Mapping[str, Any]] = {
    "warm-start": {"share": 0.1, "first_epochs": 1000, "epochs": 100},
    "continual": {"chunks": 10, "epochs": 100},
    "class-incremental": {"phases": 20, "epochs": 100},
}


def coefficients(stream: str, network: str) -> dict[str, dict[str, Any]]:
    """The options that the paper gives each method in one of its vision protocols.

    >>> coefficients("continual", "vgg16")["dash"]
    {'alpha': 0.1, 'lam': 0.1}
    """
    names = {
        "dash": ("alpha", "lam"),
        "parseval": ("coefficient",),
        "l2-init": ("coefficient",),
        "continual-backprop": ("replacement_rate", "maturity_threshold"),
        "redo": ("tau",),
        "self-normalized-reset": ("percentile",),
    }
    found: dict[str, dict[str, Any]] = {"shrink-perturb": {"coefficient": 0.8}}
    for method, values in zip(_METHODS, _TABLE[stream, network], strict=True):
        listed = values if isinstance(values, tuple) else (values,)
        found[method] = dict(zip(names[method], listed, strict=True))
    # What the paper's code calls by these names: half of the squared distance, and every layer with its norms.
    found["l2-init"]["coefficient"] /= 2
    found["parseval"] |= {"norms": True, "targets": "layers"}
    return found


_MATRIX_ARMS = (
    *("fire", "fire-10", "fire-5", "fire-nearest", "fire-norm", "fire-init", "fire-half"),
    *("random-isometry", "random-isometry-nearest", "rescale", "fresh-at-norm"),
    *("fire-state-fresh", "fire-state-moments", "fire-state-step", "fire-state-none"),
)


def touching(targets: list[str]) -> dict[str, dict[str, Any]]:
    """Coefficients with which FIRE and its controls all change the same matrices.

    >>> touching(["attention.qk"])["rescale"]
    {'targets': ['attention.qk']}
    """
    return {name: {"targets": targets} for name in _MATRIX_ARMS}


def _paper() -> list[Fields]:
    vision = [
        _setting(
            f"paper/{stream}-{network}",
            stream,
            network,
            {"data": _DATA[network], **_LENGTH[stream]},
            batch=256,
            last=1,
            evaluate=10_000,
            spare_first=stream == "warm-start",
            # Of a ViT the paper projects the queries and keys, of the others every layer.
            coefficients=coefficients(stream, network)
            | touching(["attention.qk"] if network == "vit" else ["auto", "head"]),
            about=f"the paper's {stream} on {_DATA[network]}; for a GPU, not run here as a whole",
            **_VISION,
        )
        for stream, network in _TABLE
    ]
    gpt = _setting(
        "paper/gpt",
        "domains",
        "gpt",
        {
            "data": ["hf:Salesforce/wikitext:wikitext-103-raw-v1", "hf:Skylion007/openwebtext"],
            "tokens": 50257,
            "context": 1024,
            "steps": 10_000,
        },
        {"layers": 12, "width": 768, "heads": 12},
        batch=480,
        optimizer="adamw",
        lr=6e-4,
        optimizer_options={"betas": [0.9, 0.95], "weight_decay": 0.1},
        clip=1.0,
        warmup=0.02,
        schedule="cosine",
        coefficients=touching(["paper-gpt"]),
        headline="test_loss",
        last=1,
        replay=1.0,
        evaluate=200,
        about="GPT-0.1B on WikiText-103, then OpenWebText with WikiText; steps and warm-up are ours, for a cluster",
    )
    return [*vision, gpt]


def _replaying(fields: Fields) -> Fields:
    about = f"{fields['about']}; a tenth of all old data is replayed"
    return {**fields, "name": f"{fields['name']}+replay", "replay": 0.1, "about": about}


def _keeping(fields: Fields) -> Fields:
    about = f"{fields['about']}; the optimizer lives on, for comparing what becomes of its state"
    return {**fields, "name": f"{fields['name']}+state", "new_optimizer": False, "about": about}


def named() -> list[Fields]:
    """The fields of every named setting.

    >>> named()[0]["name"]
    'digits'
    """
    laptop = {fields["name"]: fields for fields in _laptop()}
    # Streams whose data grow hold the old data anyway.
    replayed = [_replaying(laptop[n]) for n in ("random-labels", "permuted-inputs", "drift", "alphabet", "domains")]
    kept = [_keeping(laptop[name]) for name in ("random-labels", "alphabet", "domains")]
    here = [
        {**each, "about": f"{each['about']}; about {_TIMES[each['name']]} per run"}
        for each in (*laptop.values(), *replayed, *kept)
    ]
    return [*here, *presets.laptop(), *_paper(), *presets.paper()]
