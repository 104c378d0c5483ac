"""Reading the weight of an entry, by its key, by its name in another model, or through its parametrization."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from rekindle.blocks import parametrized
from rekindle.blocks.finding import Block, Found, find
from rekindle.blocks.names import locate
from rekindle.engine.isometry import polar
from rekindle.measures.spectra import real
from rekindle.projection.entries import PlanEntry
from rekindle.projection.measuring import Reader

ScaleOf = Callable[[PlanEntry, Block, Tensor, Tensor], Tensor]


def reader_of(source: nn.Module | Mapping[str, Tensor]) -> Reader:
    """How to read the value of a weight that was found in this source."""
    if isinstance(source, Mapping):
        return lambda f: source.get(f.key)
    parameters = dict(source.named_parameters(remove_duplicate=False))

    def read(f: Found) -> Tensor | None:
        if f.parametrized:
            return parametrized.read(*_computed(source, f))
        return parameters.get(f.key)

    return read


def by_name(source: nn.Module | Mapping[str, Tensor]) -> Reader:
    """How to read the weight of the same name in another model or state dict, whatever wraps either."""
    if isinstance(source, Mapping):
        return lambda f: source.get(f.key, source.get(f.name))
    named = {f.name: f for f in find(source, meta=True, sharded=True)}
    read = reader_of(source)
    return lambda f: read(named[f.name]) if f.name in named else None


def _computed(model: nn.Module, f: Found) -> tuple[nn.Module, str]:
    """The module and tensor name of a parametrized weight, from the key of one of its originals."""
    place = locate(model, f.key)
    return place.owner, place.tensor


def tried(entry: PlanEntry, f: Found, model: nn.Module, scale_of: ScaleOf) -> PlanEntry:
    """A parametrized weight is planned only if its parametrization can hold the projected value.

    scale_of: of an entry, its block, the norms and the nuclear norms of the matrices.
    """
    if not f.parametrized or entry.refusal is not None:
        return entry
    module, tensor = _computed(model, f)
    value = parametrized.read(module, tensor).clone()
    if value.is_meta:  # tried when the weights are there
        return entry
    for block in entry.blocks:
        matrix = block.read(value)
        wide = real(matrix)
        q = polar(wide)
        nuclear = (q * wide).sum((1, 2))
        scale = scale_of(entry, block, torch.linalg.vector_norm(wide, dim=(1, 2)), nuclear)
        block.write(value, q * scale.to(q)[:, None, None])
    reason = parametrized.trial(module, tensor, value)
    return entry if reason is None else replace(entry, refusal=reason, blocks=f.blocks)
