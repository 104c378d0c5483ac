"""The norm of every matrix of a block, from shards: each rank sums what it holds, and the sums are reduced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rekindle.blocks.layouts import Layout
from rekindle.blocks.names import is_sharded
from rekindle.engine.devices import to_float64
from rekindle.sharding.spread import LayoutNotSupported, Range, Spread
from rekindle.sharding.team import Team, device_of, local
from rekindle.sharding.units import factors, sizes

_AT_ONCE = 1 << 18  # elements converted to float64 at a time


def square_sums(layout: Layout, local: Tensor, extents: tuple[tuple[Range, ...], ...]) -> Tensor:
    """Σw² over a rank's own numbers, for each of the block's matrices; float64, (count,).

    >>> rule = Layout((2, 4), (2, 2, 2), (1,), (0,), (2,))
    >>> square_sums(rule, torch.ones(1, 4), (((1, 2),), ((0, 4),)))
    tensor([2., 2.], dtype=torch.float64)
    """
    taken_sizes = sizes(layout)
    taken = {factor: (start, length) for factor, start, length in layout.take}
    order: list[int] = []
    places: list[tuple[Tensor, Tensor, int]] = []  # per dimension: which indices count, for which matrix, of how many
    for dim, mine in enumerate(factors(layout)):
        index = torch.cat([torch.arange(low, high) for low, high in extents[dim]] or [torch.empty(0, dtype=torch.long)])
        number, inside, count = torch.zeros_like(index), torch.ones_like(index, dtype=torch.bool), 1
        stride = layout.shape[dim]
        for factor in mine:
            stride //= layout.split[factor]
            value = index // stride % layout.split[factor]
            start, length = taken.get(factor, (0, layout.split[factor]))
            inside &= (value >= start) & (value < start + length)
            if factor in layout.count:
                number = number * length + (value - start)
                count *= length
                order.append(factor)
        keep = inside.nonzero().flatten()
        places.append((keep.to(local.device), number[keep].to(local.device), count))
    summed = torch.zeros([count for _, _, count in places], dtype=torch.float64, device=local.device)
    rows, numbers, _ = places[0]
    step = max(1, _AT_ONCE // max(1, local.shape[1:].numel()))
    for first in range(0, len(rows), step):  # a float64 copy of a whole shard would be twice the shard
        part = slice(first, first + step)
        total = local.detach().index_select(0, rows[part]).double().square_()
        for dim, (keep, number, count) in reversed(list(enumerate(places))[1:]):
            fewer = total.new_zeros([*total.shape[:dim], count, *total.shape[dim + 1 :]])
            total = fewer.index_add_(dim, number, total.index_select(dim, keep))
        summed.index_add_(0, numbers[part], total)
    return summed.reshape([taken_sizes[f] for f in order]).permute([order.index(f) for f in layout.count]).flatten()


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """‖t‖ of each tensor in float64, DTensors as a whole: then every process of their meshes must make the call.

    >>> norms([torch.tensor([3.0, 4.0]), torch.ones(4)])
    tensor([5., 2.], dtype=torch.float64)
    """
    if not any(is_sharded(tensor) for tensor in tensors):
        return to_float64(torch.stack(list(torch._foreach_norm(list(tensors)))))
    found = torch.zeros(len(tensors), dtype=torch.float64)
    groups: dict[tuple[int, ...], list[int]] = {}
    for place, tensor in enumerate(tensors):
        own = local(tensor)
        if is_sharded(tensor):
            try:
                spread = Spread.of(tensor)
            except LayoutNotSupported:  # a partial sum: a gradient that is not reduced yet
                whole: Any = tensor.detach()
                found[place] = whole.full_tensor().double().square().sum().cpu()
                continue
            groups.setdefault(spread.ranks, []).append(place)
            if not spread.sends(torch.distributed.get_rank(), spread.ranks[0]):
                continue  # another rank's copy counts
        found[place] = own.double().square().sum().cpu()
    for ranks, places in groups.items():
        found[places] = Team.of(ranks, device_of(tensors[places[0]])).sum(found[places])
    return found.sqrt()
