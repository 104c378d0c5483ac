"""The zoo: how each family is built small, on the meta device and without weights, and what is read off its plan."""

from __future__ import annotations

import enum
import re
import sys
import types
from typing import Any

import torch
from torch import nn

from rekindle.blocks.finding import find


def build(name: str) -> nn.Module:
    """The model of a transformers class with at most two layers per stack."""
    import transformers

    cls = getattr(transformers, name)
    config = cls.config_class()
    inner = [getattr(config, key) for key in dir(config) if key.endswith("_config")]
    for part in [config, *(c for c in inner if hasattr(c, "to_dict"))]:
        _shrink(part)
    with torch.device("meta"):
        model: nn.Module = cls(config)
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
    _stub_torchvision()
    import timm

    with torch.device("meta"):
        model: nn.Module = timm.create_model(name)
    return model


def _stub_torchvision() -> None:
    if "torchvision" in sys.modules:
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
        made.__spec__ = None
        sys.modules[name] = made
        above, _, leaf = name.rpartition(".")
        if above:
            setattr(sys.modules[above], leaf, made)
        return made

    for name in ("", ".transforms", ".transforms.functional", ".datasets", ".ops", ".ops.misc", ".utils"):
        module(f"torchvision{name}")
    modes = enum.Enum("InterpolationMode", "NEAREST BILINEAR BICUBIC BOX HAMMING LANCZOS")
    sys.modules["torchvision.transforms.functional"].InterpolationMode = modes  # type: ignore[attr-defined]
    sys.modules["torchvision.ops.misc"].FrozenBatchNorm2d = nn.BatchNorm2d  # type: ignore[attr-defined]


def summary(model: nn.Module) -> dict[str, list[str]]:
    """Heads, routers, weights split into parts, and weights skipped as fused, with `*` for numbers."""
    found: dict[str, set[str]] = {"heads": set(), "routers": set(), "parts": set(), "fused": set()}
    for f in find(model, meta=True):
        name = re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", f.name.removesuffix(".weight"))
        if "head" in f.marks:
            found["heads"].add(name)
        if f.role == "router" and f.blocks:
            found["routers"].add(name)
        if len(f.blocks) > 1:
            found["parts"].add(name)
        if f.refusal and "fused" in f.refusal:
            found["fused"].add(name)
    return {key: sorted(names) for key, names in found.items()}
