"""The parameters of a model: names without wrappers, where each parameter sits, how its numbers are stored.

No other module sees through wrappers.

`torch.compile`, DDP, FSDP, activation checkpointing, Lightning Fabric and DeepSpeed hold the user's model as an
attribute, which then stands in every parameter's name. A wrapper is recognized by its class, so an attribute of the
user's own that happens to be called `module` stays in the name. A state dict has no classes: there the unmistakable
names are removed anywhere, and `module.` only where all keys begin with it.

`named_parameters(model)` gives clean names; `Location` is where one parameter sits; `unusable` says why its numbers can
be neither read nor written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from rekindle.blocks import parametrized

# Class of the wrapper → the attributes that hold the wrapped module. Fabric holds it twice.
_WRAPPERS = {
    "DistributedDataParallel": ("module",),
    "DataParallel": ("module",),
    "AveragedModel": ("module",),
    "DeepSpeedEngine": ("module",),
    "FullyShardedDataParallel": ("_fsdp_wrapped_module",),
    "OptimizedModule": ("_orig_mod",),
    "CheckpointWrapper": ("_checkpoint_wrapped_module",),
    "OffloadWrapper": ("_checkpoint_wrapped_module",),
    "_FabricModule": ("_forward_module", "_original_module"),
}
_PACKAGES = {"torch", "deepspeed", "lightning", "lightning_fabric", "pytorch_lightning", "accelerate", "fairscale"}
_UNMISTAKABLE = {name for names in _WRAPPERS.values() for name in names} - {"module"}


@dataclass(frozen=True)
class Location:
    """Where a parameter sits: clean attribute names and modules from the root to its owner, and its own name.

    `computed` says that the parameter is an original of a parametrized weight; `tensor` is then that weight.

    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> Location(("0",), (model, model[0]), "weight").name
    '0.weight'
    """

    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    tensor: str
    computed: bool = False
    owner: nn.Module = field(init=False)  # the module that holds the parameter
    name: str = field(init=False)  # the dotted name
    module: str = field(init=False)  # the dotted name of the owner

    def __post_init__(self) -> None:
        """Fields rather than properties: they are read several times per parameter."""
        object.__setattr__(self, "owner", self.modules[-1])
        object.__setattr__(self, "module", ".".join(self.names))
        object.__setattr__(self, "name", ".".join((*self.names, self.tensor)))


def wrapped(module: nn.Module) -> nn.Module | None:
    """The module inside a wrapper, None if this module is no wrapper.

    >>> inner = nn.Linear(1, 1)
    >>> wrapped(nn.DataParallel(inner)) is inner, wrapped(inner)
    (True, None)
    """
    for name in _attributes(module):
        inner = module._modules.get(name)
        if inner is not None:
            return inner
    return None


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside any number of wrappers.

    >>> inner = nn.Linear(1, 1)
    >>> unwrapped(nn.DataParallel(torch.compile(inner))) is inner
    True
    """
    while (inner := wrapped(model)) is not None:
        model = inner
    return model


def uncompiled(model: nn.Module) -> nn.Module:
    """The module behind `torch.compile`; other wrappers stay (a sharded model works through its wrapper only).

    >>> inner = nn.DataParallel(nn.Linear(1, 1))
    >>> uncompiled(torch.compile(inner)) is inner
    True
    """
    while "_orig_mod" in _attributes(model):
        inner = wrapped(model)
        assert inner is not None
        model = inner
    return model


def locate(model: nn.Module, key: str) -> Location:
    """Where the parameter or buffer sits that `named_parameters()` calls `key`.

    >>> layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    >>> locate(nn.DataParallel(nn.Sequential(layer)), "module.0.parametrizations.weight.original0").name
    '0.weight'
    """
    *path, tensor = key.split(".")
    modules: list[nn.Module] = [model]
    names: list[str] = []
    for depth, name in enumerate(path):
        parent = modules[-1]
        if name == "parametrizations" and parametrize.is_parametrized(parent):
            return Location(tuple(names), tuple(modules), path[depth + 1], True)
        child = parent._modules[name]
        assert child is not None
        if name in _attributes(parent):
            modules[-1] = child
            continue
        modules.append(child)
        names.append(name)
    # Weights of the older weight_norm and spectral_norm are computed by a hook.
    hooked = parametrized.hooked_tensor(modules[-1], tensor) if modules[-1]._forward_pre_hooks else None
    return Location(tuple(names), tuple(modules), hooked or tensor, hooked is not None)


def locations(model: nn.Module) -> list[tuple[str, nn.Parameter, Location]]:
    """(key, parameter, location) of everything in `named_parameters()`, each name of a tied parameter on its own.

    >>> [place.name for _, _, place in locations(nn.DataParallel(nn.Linear(1, 1)))]
    ['weight', 'bias']
    """
    named = model.named_parameters(remove_duplicate=False)
    return [(key, parameter, locate(model, key)) for key, parameter in named]


def cleaner(model: nn.Module) -> Callable[[str], str]:
    """A function that takes the wrappers of this model out of names of its modules, parameters and buffers.

    Originals of parametrized weights keep their own names, so that names stay different.

    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.module = nn.Linear(1, 1)
    >>> cleaner(nn.DataParallel(Net()))("module.module.weight")
    'module.weight'
    """
    seams = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in _attributes(module)
    }

    def clean(name: str) -> str:
        if not seams:
            return name
        parts = name.split(".")
        return ".".join(part for i, part in enumerate(parts) if ".".join(parts[: i + 1]) not in seams)

    return clean


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """`model.named_parameters()` with clean names.

    >>> [name for name, _ in named_parameters(torch.compile(nn.Linear(1, 1)))]
    ['weight', 'bias']
    """
    clean = cleaner(model)
    return ((clean(name), parameter) for name, parameter in model.named_parameters())


def named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """`model.named_buffers()` with clean names.

    >>> [name for name, _ in named_buffers(nn.DataParallel(nn.BatchNorm1d(2)))]
    ['running_mean', 'running_var', 'num_batches_tracked']
    """
    clean = cleaner(model)
    return ((clean(name), buffer) for name, buffer in model.named_buffers())


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`model.named_modules()` with clean names and without the wrappers themselves.

    >>> [name for name, _ in named_modules(nn.DataParallel(nn.Sequential(nn.ReLU())))]
    ['', '0']
    """
    clean = cleaner(model)
    return ((clean(name), module) for name, module in model.named_modules() if wrapped(module) is None)


def state_cleaner(keys: Iterable[str]) -> Callable[[str], str]:
    """The same for the keys of a state dict, of which no class is known.

    >>> state_cleaner(["module._orig_mod.0.weight", "module._orig_mod.0.bias"])("module._orig_mod.0.weight")
    '0.weight'
    >>> state_cleaner(["module.weight", "head.weight"])("module.weight")
    'module.weight'
    """
    plain = [[part for part in key.split(".") if part not in _UNMISTAKABLE] for key in keys]
    outer = 0
    while plain and all(len(parts) > outer + 1 and parts[outer] == "module" for parts in plain):
        outer += 1

    def clean(name: str) -> str:
        return ".".join([part for part in name.split(".") if part not in _UNMISTAKABLE][outer:])

    return clean


def unusable(parameter: Tensor) -> str | None:
    """Why no matrix can be read from or written to this tensor, whatever its shape; None if it can.

    >>> unusable(torch.zeros(2, 2, dtype=torch.int8))
    'quantized or packed (torch.int8)'
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
        return f"quantized or packed ({parameter.dtype})"
    if parameter.dtype.itemsize == 1:
        return f"quantized ({parameter.dtype})"
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
    return {
        id(each): Storage(unusable(each), is_lazy(each), is_sharded(each) or partition_of(each) is not None)
        for each in parameters
    }


def sharded_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The DTensors among the parameters, under each of their names in `named_parameters()`.

    >>> sharded_parameters(nn.Linear(2, 2))
    {}
    """
    try:
        named = model.named_parameters(remove_duplicate=False)
    except TypeError as error:
        kind = type(model).__name__
        raise TypeError(
            f"{kind} holds parameters without their layers, as losses of torchrl do: give the network that it trains"
        ) from error
    return {name: each for name, each in named if is_sharded(each)}


def is_sharded(parameter: Tensor) -> bool:
    """Whether the parameter is a DTensor.

    >>> is_sharded(torch.zeros(2))
    False
    """
    if type(parameter) is nn.Parameter and type(parameter.data) is Tensor:
        return False
    # By name: importing torch.distributed.tensor costs a second that most users never need.
    return any(c.__name__ == "DTensor" for c in type(parameter).__mro__ + type(parameter.data).__mro__)


PARTITION = "_rekindle_partition"  # where a stand-in for a parameter of DeepSpeed ZeRO has what it stands for


def partition_of(parameter: Tensor) -> Any:
    """What this parameter stands for, if it only shows the shape of one that DeepSpeed ZeRO holds in parts; else None.

    >>> partition_of(torch.zeros(2))
    """
    return getattr(parameter, PARTITION, None)


def partitions(model: nn.Module) -> dict[str, Any]:
    """`partition_of` for those parameters that have one, under each of their names in `named_parameters()`.

    >>> partitions(nn.Linear(2, 2))
    {}
    """
    named = model.named_parameters(remove_duplicate=False)
    return {name: partition for name, each in named if (partition := partition_of(each)) is not None}


def _attributes(module: nn.Module) -> tuple[str, ...]:
    """The attributes in which a wrapper holds its module; none for any other class."""
    for cls in type(module).__mro__:
        if cls.__name__ in _WRAPPERS and cls.__module__.partition(".")[0] in _PACKAGES:
            return _WRAPPERS[cls.__name__]
    return ()


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
