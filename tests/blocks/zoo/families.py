"""The zoo: how each family is built small, on the meta device and without weights, and what its plan should say."""

from __future__ import annotations

import enum
import importlib
import importlib.util
import re
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rekindle.blocks.finding import Found, find


def build(name: str, config: dict[str, Any], module: str = "transformers") -> nn.Module:
    """The model of a transformers class with at most four layers per stack."""
    cls = getattr(importlib.import_module(module), name)
    made = cls.config_class(**config)
    inner = [getattr(made, key) for key in dir(made) if key.endswith("_config")]
    for part in [made, *(c for c in inner if hasattr(c, "to_dict"))]:
        _shrink(part)
    with torch.device("meta"):
        model: nn.Module = cls(made)
    return model


def _shrink(config: Any) -> None:
    for key in ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "n_layers"):
        if isinstance(getattr(config, key, None), int) and getattr(config, key) > 4:
            try:
                setattr(config, key, 4)
            except (AttributeError, NotImplementedError):
                continue
            for listed in ("layer_types", "mlp_layer_types"):
                if isinstance(config.__dict__.get(listed), list):
                    config.__dict__[listed] = config.__dict__[listed][:4]


def build_timm(name: str) -> nn.Module:
    """A timm model; the few names of torchvision that timm imports are stubs, for there is no torchvision here."""
    with _stubs_of_torchvision():
        import timm

        with torch.device("meta"):
            model: nn.Module = timm.create_model(name)
    return model


@contextmanager
def _stubs_of_torchvision() -> Iterator[None]:
    """Names that timm imports, gone again afterwards: transformers asks later whether torchvision is installed."""
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return

    class Anything:
        def __init__(self, *_: Any, **__: Any) -> None: ...

    def stub(attribute: str) -> type:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return type(attribute, (Anything,), {})

    def module(name: str) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__getattr__ = stub  # type: ignore[method-assign]
        made.__path__ = []
        above, _, leaf = name.rpartition(".")
        if above:
            setattr(made_of[above], leaf, made)
        return made

    made_of: dict[str, types.ModuleType] = {}
    for part in ("", ".transforms", ".transforms.functional", ".datasets", ".ops", ".ops.misc", ".utils"):
        made_of[f"torchvision{part}"] = module(f"torchvision{part}")
    modes = enum.Enum("InterpolationMode", "NEAREST BILINEAR BICUBIC BOX HAMMING LANCZOS")
    made_of["torchvision.transforms.functional"].InterpolationMode = modes  # type: ignore[attr-defined]
    made_of["torchvision.ops.misc"].FrozenBatchNorm2d = nn.BatchNorm2d  # type: ignore[attr-defined]
    sys.modules.update(made_of)
    try:
        yield
    finally:
        for name in made_of:
            sys.modules.pop(name, None)


KINDS = ("heads", "routers", "parts", "fused", "unknown")
# What may be skipped without being written down: no matrices, or matrices that are skipped by their very kind.
ORDINARY = re.compile(
    r"bias|vector|norm |embedding|depthwise|a position or token vector|tied to|part of the param|frozen"
)


def planned(found: list[Found]) -> dict[str, dict[str, str]]:
    """What the planner says: kind → clean name → the names of its parts, or the reason."""
    said: dict[str, dict[str, str]] = {kind: {} for kind in KINDS} | {"strange": {}, "unsettled": {}}
    for f in found:
        name, reason = f.name, f.reason or ""
        if "head" in f.marks:
            said["heads"][name] = reason
        elif f.role == "router" and "router" in f.marks:
            said["routers"][name] = reason
        elif len(f.blocks) > 1:
            said["parts"][name] = " ".join(b.part for b in f.blocks)
        elif "fused" in reason:
            said["fused"][name] = reason
        elif reason.startswith("layout not known"):
            said["unknown"][name] = reason
        elif reason.endswith("give example=batch"):
            said["unsettled"][name] = reason
        elif reason and not ORDINARY.match(reason):
            said["strange"][name] = reason
    return said


def named(found: list[Found], model: nn.Module, glob: str) -> list[Found]:
    """The weights of this name: `*` is any one step of it, ` @Class` the class of the module above."""
    glob, _, above = glob.partition(" @")
    pattern = re.compile("".join("[^.]+" if c == "*" else re.escape(c) for c in glob) + r"(\.weight)?")
    return [
        f
        for f in found
        if any(pattern.fullmatch(n) for n in (f.name, *f.also))
        and (not above or type(model.get_submodule(f.module.rpartition(".")[0])).__name__ == above)
    ]


def disagreements(model: nn.Module, expected: dict[str, Any]) -> list[str]:
    """Where the plan of this model is not what was written down, one line per weight."""
    found = find(model, meta=True)
    said = planned(found)
    unsettled = said.pop("unsettled")  # without an example source alone cannot tell: a skip is right for any of these
    wanted: dict[str, dict[str, str]] = {kind: {} for kind in said}
    wrong = []
    for kind in (*KINDS, "careful"):
        for glob in expected.get(kind, ()):
            chosen = named(found, model, glob)
            if not chosen:
                wrong.append(f"{kind}: there is no {glob}")
            for f in chosen:
                if kind == "heads" and not f.blocks:  # tied to a weight that is skipped anyway
                    continue
                wanted["fused" if kind == "careful" else kind][f.name] = expected[kind][glob] if kind == "parts" else ""
    for kind, names in said.items():
        wrong += [f"{kind}: {n} is not" for n in sorted(wanted[kind].keys() - names.keys() - unsettled.keys())]
        wrong += [f"{kind}: {n} is, {names[n]!r}" for n in sorted(names.keys() - wanted[kind])]
    parts = wanted["parts"].keys() & said["parts"]
    wrong += [f"parts of {n}: {said['parts'][n]}" for n in sorted(parts) if wanted["parts"][n] != said["parts"][n]]
    for glob in expected.get("missed", ()):
        late = named(found, model, glob)
        wrong += [f"missed: {glob} is found after all"] * (not late or any("head" in f.marks for f in late))
    return wrong
