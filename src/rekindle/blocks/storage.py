"""How a parameter is stored: whether its numbers can be read and written at all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy as is_torch_lazy


def unusable(parameter: Tensor) -> str | None:
    """Why no matrix can be read from or written to this tensor, whatever its shape; None if it can.

    >>> unusable(torch.zeros(2, 2, dtype=torch.int8))
    'quantised or packed (torch.int8)'
    """
    if is_lazy(parameter):
        return "lazy: run one forward pass first, it has no shape yet"
    if hasattr(parameter, "ds_id") and not parameter.numel():
        return "partitioned by DeepSpeed ZeRO-3: gather it first"
    if parameter.layout != torch.strided:
        return f"sparse ({parameter.layout}): convert it to a dense weight first"
    if parameter.dtype.is_complex:
        return f"complex ({parameter.dtype}): only real weights are supported"
    if not parameter.dtype.is_floating_point:
        return f"quantised or packed ({parameter.dtype})"
    if parameter.dtype.itemsize == 1:
        return f"quantised ({parameter.dtype})"
    data = type(parameter.data)
    if type(parameter).__name__ == "FlatParameter":
        return "flattened by FSDP1: use fully_shard (FSDP2) or use_orig_params"
    if data is not Tensor and data is not nn.Parameter and not is_sharded(parameter):
        return f"stored as {data.__name__}, a tensor subclass that hides its numbers"
    return None


class Storage(NamedTuple):
    """How one parameter is stored: why it cannot be used (None if it can), and whether it is lazy or a DTensor."""

    refusal: str | None
    lazy: bool
    sharded: bool


def storage_of(parameters: Iterable[Tensor]) -> dict[int, Storage]:
    """How each of these parameters is stored, by its id.

    >>> weight = nn.LazyLinear(3).weight
    >>> storage_of([weight])[id(weight)].lazy
    True
    """
    return {id(each): Storage(unusable(each), is_lazy(each), is_sharded(each)) for each in parameters}


def sharded_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The DTensors among the parameters, under each of their names in `named_parameters()`.

    >>> sharded_parameters(nn.Linear(2, 2))
    {}
    """
    return {name: each for name, each in model.named_parameters(remove_duplicate=False) if is_sharded(each)}


def packed_weights(model: nn.Module) -> list[tuple[str, nn.Module, tuple[int, ...], torch.dtype]]:
    """(name, module, shape, dtype) of weights that are no parameters: torch.ao's modules, GPTQ's integer buffers.

    >>> layer = nn.Module()
    >>> layer.register_buffer("qweight", torch.zeros(4, 2, dtype=torch.int32))
    >>> [(name, shape) for name, _, shape, _ in packed_weights(layer)]
    [('qweight', (4, 2))]
    """
    found = []
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if ".quantized" in type(module).__module__ and callable(getattr(module, "weight", None)):
            weight = module.weight()
            found.append((f"{prefix}weight", module, tuple(weight.shape), weight.dtype))
        for name, tensor in module.named_buffers(recurse=False):
            integer = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
            if integer and tensor.dim() > 1 and "weight" in name:
                found.append((f"{prefix}{name}", module, tuple(tensor.shape), tensor.dtype))
    return found


def is_lazy(parameter: Tensor) -> bool:
    """Whether the parameter of a lazy module has no shape yet.

    >>> is_lazy(nn.LazyLinear(3).weight)
    True
    """
    return is_torch_lazy(parameter)


def is_sharded(parameter: Tensor) -> bool:
    """Whether the parameter is a DTensor.

    >>> is_sharded(torch.zeros(2))
    False
    """
    # By name: importing torch.distributed.tensor costs a second that most users never need.
    return any(c.__name__ == "DTensor" for c in type(parameter).__mro__ + type(parameter.data).__mro__)
