"""The matrices of sharded weights, measured whole on their owners; every process gets all the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.blocks.finding import Found
from rekindle.engine.devices import full_precision
from rekindle.measures.matrices import Measures, Mode, measure
from rekindle.measures.spectra import NoSpectrum
from rekindle.projection.scales import Scale
from rekindle.sharding.assembly import Assembly, Item
from rekindle.sharding.units import Part
from rekindle.sharding.wrappers import distributed


def measure_shards(model: nn.Module, found: Sequence[Found], mode: Mode) -> list[dict[int, Measures]]:
    """For each weight (all of them DTensors): place of a block → its measures; what is not finite is left out.

    Every process of the model must make the call.
    """
    if not found:
        return []
    team, spreads = distributed(model, copies=False)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    paper = Scale.parse("paper")
    items = [Item(f.name, parameters[f.key], spreads[f.key], tuple(b.layout for b in f.blocks)) for f in found]

    @full_precision()
    def look(number: int, part: Part, box: Tensor) -> Measures | None:
        with suppress(NoSpectrum):
            scale = paper.known(found[number].blocks[part.block]) or 1.0
            return measure(part.layout.read(box), scale=scale, mode=mode)
        return None

    results: list[dict[int, Measures]] = [{} for _ in found]
    for (number, block), parts in Assembly(team, items).measure(look).items():
        known = [each for _, each in parts if each is not None]
        if len(known) == len(parts):
            results[number][block] = _joined(known)
    return results


def _joined(parts: Sequence[Measures]) -> Measures:
    """The measures of a block whose matrices were measured in several places."""
    if len(parts) == 1:
        return parts[0]
    tensors = [field.name for field in fields(Measures) if isinstance(getattr(parts[0], field.name), Tensor)]
    whole: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in tensors}
    return replace(parts[0], **whole)
