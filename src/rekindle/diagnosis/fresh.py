"""What fresh networks of the same class show on the same batches: the reference where the user has none.

Torch's own start leaves 15 to 32% of the units of a deeper ReLU layer dormant. An absolute rule alone would call such
a network tired, so the rule must also hold against networks that have learned nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rekindle import initial
from rekindle.blocks.names import is_sharded, unwrapped
from rekindle.diagnosis.verdict import Numbers
from rekindle.isolation import Batch
from rekindle.projection.recalibration import recalibrate

DRAWS = 5
MOST_PARAMETERS = 100_000_000  # a copy of a larger model is too much for a second opinion

_cache: WeakKeyDictionary[nn.Module, tuple[Any, Numbers]] = WeakKeyDictionary()


def fresh_numbers(
    model: nn.Module, batches: Sequence[Batch], measure: Callable[[nn.Module], Numbers], key: object
) -> Numbers | None:
    """The mean of `measure` over fresh networks like `model`; None where none can be drawn.

    `key` is what the numbers depend on beside the model and the batches. The last result of a model is kept, and given
    again for the same shapes and batches.

    >>> net = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    >>> norm = lambda network: Numbers(whole={"norm": network[0].weight.norm().item()})
    >>> 0 < fresh_numbers(net, [torch.ones(2, 8)], norm, "norm").whole["norm"] < 3
    True
    """
    inner = unwrapped(model)
    parameters = list(inner.parameters())
    if sum(p.numel() for p in parameters) > MOST_PARAMETERS or any(is_sharded(p) for p in parameters):
        return None
    about = (key, tuple(p.shape for p in parameters), _fingerprint(batches))
    if inner in _cache and _cache[inner][0] == about:
        return _cache[inner][1]
    # Where no batch has gone through BatchNorm yet, the statistics of the others stay at their start too.
    trained = any(bool(buffer) for name, buffer in inner.named_buffers() if name.endswith("num_batches_tracked"))
    drawn = []
    try:
        for seed in range(DRAWS):
            start = initial.draw(inner, generator=torch.Generator().manual_seed(seed))
            network = copy.deepcopy(inner)
            own = initial.tensors_of(network)
            with torch.no_grad():
                for name, tensor in start.items():
                    own[name].copy_(tensor)
            if trained:
                network.train()
                recalibrate(network, batches)
            network.eval()
            drawn.append(measure(network))
    except (initial.UnknownStart, RuntimeError, TypeError, ValueError):  # it cannot be copied or drawn
        return None
    numbers = Numbers(
        {name: _mean([one.weights.get(name, {}) for one in drawn]) for name in drawn[0].weights},
        {name: _mean([one.units.get(name, {}) for one in drawn]) for name in drawn[0].units},
        _mean([one.heads for one in drawn]),
        _mean([one.whole for one in drawn]),
    )
    _cache[inner] = about, numbers
    return numbers


def _mean(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {
        name: sum(one[name] for one in values) / len(values) for name in values[0] if all(name in one for one in values)
    }


def _fingerprint(batches: Iterable[Batch]) -> tuple[Any, ...]:
    """Shape and sum of every tensor in the batches."""
    return tuple(
        (tuple(tensor.shape), float(tensor.detach().float().sum())) for batch in batches for tensor in _tensors(batch)
    )


def _tensors(batch: object) -> Iterable[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | list | tuple):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(value)
