"""A pretend accelerator for machines without one: real numbers on a device of their own, `acc:0`.

What it catches is what a GPU would: an operation whose tensors are on two devices, a generator of the wrong device, a
conversion to NumPy; and it counts how often the host has to wait for the device. Numbers are those of the CPU.

`install()` registers the device for the whole process and cannot be undone, so that tests which use it run in a
process of their own (`tests/test_accelerator.py`). `install(like_mps=True)` refuses what Apple's GPUs refuse: every
tensor of float64, and decompositions, which torch has no kernels for there.

    install()
    model.to("acc")
    with waits() as counted:
        rekindle.fire(model)
    print(counted)                     # Counter({'aten._local_scalar_dense': 3})
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

from rekindle.engine import operator

NAME = "acc"
_REFUSED_BY_MPS = ("_linalg_svd", "_linalg_eigh", "linalg_eig", "linalg_qr")
_limits = {"like_mps": False}

_waited: Counter[str] = Counter()

# Operations that make the host wait because they need a number or a size that the device computes. The last two check
# for failure on the host.
_WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique_dim", "_unique2", "is_nonzero")
_WAITS += ("_linalg_svd", "_linalg_eigh")
# Operations that may take tensors of both devices: copies, and indices that a device accepts from the host.
_MIX = ("copy_", "_to_copy", "index", "index_put_", "_index_put_impl_", "set_")


class OnDevice(Tensor):
    """A tensor that says it is on `acc:0`; what it holds is on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        if _limits["like_mps"] and held.dtype in (torch.float64, torch.complex128):
            raise TypeError(f"Cannot convert a {NAME} tensor to float64: the device does not support it. Use float32")
        made = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
            requires_grad=False,
        )
        made.held = held
        return made

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({self.held!r})"

    def data_ptr(self) -> int:
        """Where the memory lies: views of one tensor share it."""
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """What tells whether two tensors share memory."""
        return self.held.untyped_storage()

    def tolist(self) -> Any:
        """One wait, however many numbers."""
        _waited["tolist"] += 1
        return self.held.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        """Refused as on a GPU."""
        raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy. Use Tensor.cpu()")

    def __array__(self, *_: Any) -> Any:
        return self.numpy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = self.detach().clone()
        twin = torch.nn.Parameter(twin, self.requires_grad) if isinstance(self, torch.nn.Parameter) else twin
        memo[id(self)] = twin.requires_grad_(self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _restored, (self.held.detach().clone(), self.requires_grad, isinstance(self, torch.nn.Parameter))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _restored(held: Tensor, requires_grad: bool, parameter: bool) -> Tensor:
    made: Tensor = OnDevice(held)
    return torch.nn.Parameter(made, requires_grad) if parameter else made.requires_grad_(requires_grad)


class _Backend(backend_registration._DummyBackendModule):
    """What torch asks a device for: here, the random state. Numbers are drawn by the CPU, so it is the CPU's."""

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


def install(*, like_mps: bool = False) -> None:
    """Register the device with torch, for good."""
    _limits["like_mps"] = like_mps
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Backend())
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(_run_boxed, "PrivateUse1")
    _kept.append(fallback)  # what is registered goes with the object
    made = torch.library.Library("aten", "IMPL")
    for name in ("empty.memory_format", "empty_strided", "_to_copy", "_copy_from_and_resize", "_copy_from"):
        func = _overload(name)
        made.impl(name, _as_kernel(func), "PrivateUse1")
    _kept.append(made)


_kept: list[Any] = []


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _as_kernel(func: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: _run(func, args, kwargs)


def _run_boxed(func: Any, *args: Any, **kwargs: Any) -> Any:
    return _run(func, args, kwargs)


@contextmanager
def waits() -> Iterator[Counter[str]]:
    """Counts by operation how often the host waited for the device; full when the block ends."""
    before = _waited.copy()
    found: Counter[str] = Counter()
    yield found
    found.update(_waited - before)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func.namespace == "rekindle":  # an operator of the library: its kernel is made of the device's own operations
        return operator.kernel(*args, **kwargs)
    name = func._schema.name.removeprefix("aten::")
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    here = [tensor for tensor in tensors if isinstance(tensor, OnDevice)]
    to = kwargs.get("device")
    on_device = bool(here) if to is None else torch.device(to).type == NAME
    if name not in _MIX and here:
        strangers = [t for t in tensors if not isinstance(t, OnDevice) and t.dim() > 0]
        if strangers:
            raise RuntimeError(f"{name}: expected all tensors to be on {NAME}:0, found one on {strangers[0].device}")
    generator = kwargs.get("generator") or next((leaf for leaf in leaves if isinstance(leaf, torch.Generator)), None)
    if generator is not None and on_device:
        raise RuntimeError(f"{name}: expected a generator of {NAME}, found one of {generator.device}")
    if here and _limits["like_mps"] and name in _REFUSED_BY_MPS:
        raise NotImplementedError(f"{name} is not implemented for the device {NAME}")
    _count(name, args, here, on_device)
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    plain = {key: ("cpu" if key == "device" and value is not None else value) for key, value in kwargs.items()}
    result = func(*tree_map(_held, args), **tree_map(_held, plain))
    if func._schema.is_mutable:
        return _written(func, args, kwargs, result)
    return tree_map(_wrapped, result) if on_device else result


def _count(name: str, args: Any, here: list[Tensor], on_device: bool) -> None:
    if not here:
        return
    leaves_device = (name == "_to_copy" and not on_device) or (
        name == "copy_" and not isinstance(args[0], OnDevice) and isinstance(args[1], OnDevice)
    )
    masked = name in ("index", "index_put_", "_index_put_impl_") and any(
        isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
    )
    if name in _WAITS or leaves_device or masked:
        _waited[name] += 1


def _written(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
    """What an operation that writes returns: the tensors that were given to it, not new ones."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    outs = [
        given[a.name]
        for a in func._schema.arguments
        if a.alias_info is not None and a.alias_info.is_write and a.name in given
    ]
    returned = list(func._schema.returns)
    if not returned:
        return None
    if len(returned) == 1:
        return outs[0] if returned[0].alias_info is not None else tree_map(_wrapped, result)
    written = iter(outs)
    return tuple(
        next(written) if r.alias_info is not None else tree_map(_wrapped, value)
        for r, value in zip(returned, result, strict=True)
    )


def _held(leaf: Any) -> Any:
    return leaf.held if isinstance(leaf, OnDevice) else leaf


def _wrapped(leaf: Any) -> Any:
    return OnDevice(leaf) if isinstance(leaf, Tensor) and not isinstance(leaf, OnDevice) else leaf
