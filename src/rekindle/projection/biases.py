"""The biases that belong to projected weights: how they are called, which of their entries, and zeroing them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rekindle.blocks.layouts import Block
from rekindle.blocks.names import is_sharded
from rekindle.sharding.spread import Spread
from rekindle.sharding.team import local

_PACKED = ("q_proj_weight", "k_proj_weight", "v_proj_weight")  # of MultiheadAttention, which has one bias for all


def bias_names(tensor: str) -> list[str]:
    """How the bias that belongs to a weight of this name may be called, beside it.

    >>> bias_names("weight_ih_l0")
    ['bias_ih_l0', 'weight_ih_l0_bias']
    """
    names = [tensor.replace("weight", "bias")] if "weight" in tensor else []
    return [*names, f"{tensor}_bias", *(["in_proj_bias"] if tensor in _PACKED else [])]


def bias_entries(tensor: str, blocks: tuple[Block, ...], weight: Tensor, size: int) -> object:
    """An index to the entries of a bias of this size that belong to these blocks of a weight."""
    if tensor in _PACKED:
        each = size // 3
        return slice(_PACKED.index(tensor) * each, (_PACKED.index(tensor) + 1) * each)
    if sum(block.count * block.out * block.in_ for block in blocks) == weight.numel():
        return slice(None)
    return torch.cat([_outputs(block, weight, size) for block in blocks])


def zero(bias: Tensor, outputs: Any) -> None:
    """Zero these entries of a bias, of a sharded one those that this process holds."""
    if not is_sharded(bias):
        bias[outputs] = 0
        return
    chosen = torch.zeros(bias.shape, dtype=torch.bool)
    chosen[outputs if isinstance(outputs, slice) else outputs.cpu()] = True
    extents = Spread.of(bias).extents(torch.distributed.get_rank())[0]
    own = local(bias)
    mine = torch.cat([chosen[start:stop] for start, stop in extents] or [chosen[:0]]).to(own.device)
    own.masked_fill_(mine, 0)


def _outputs(block: Block, weight: Tensor, size: int) -> Any:
    """Which of the `size` outputs of a fused weight a block computes."""
    for dim in range(weight.ndim):
        if weight.shape[dim] != size:
            continue
        shape = [1] * weight.ndim
        shape[dim] = size
        outputs = block.read(torch.arange(size).reshape(shape).expand(weight.shape).contiguous())
        if bool((outputs == outputs[..., :1]).all()):
            return outputs[..., 0].flatten().to(weight.device)
    raise ValueError(f"no axis of a weight of shape {tuple(weight.shape)} has {size} outputs: use biases='keep'")
