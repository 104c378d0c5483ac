"""Where and how numbers are computed, whatever the caller has switched on or off.

`torch.autocast` casts every product to bfloat16 or float16, also those of a solver that promises six digits, and
`torch.set_default_device` makes small helper tensors on another device than the weights. Verbs that compute on weights
are wrapped in `full_precision()`, those that need gradients in `learning()`; both also work as decorators. On an
accelerator every `float(tensor)` makes the host wait until all earlier work is done: values of many matrices are kept
as tensors, and `to_host` fetches them together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import lru_cache

import torch
from torch import Tensor

# The default device of the outermost caller, where it was changed.
_CALLERS: ContextVar[torch.device | None] = ContextVar("callers_device", default=None)
_DEVICES = ("cpu", "cuda", "mps", "xpu", "mtia", "hpu")


@contextmanager
def full_precision() -> Iterator[None]:
    """Autocast off on every device and the CPU as default device inside; no effect where that is already so.

    Weights that are written inside must not stay in autocast's cache of cast copies, so it is cleared.

    >>> w = torch.eye(2)
    >>> with torch.autocast("cpu"), full_precision():
    ...     (w @ w).dtype
    torch.float32
    """
    # One question at every step of some methods; which devices, only where there is one.
    active = [kind for kind in _DEVICES if _enabled(kind)] if torch._C._is_any_autocast_enabled() else []
    if not active and torch.get_default_device().type == "cpu":
        yield
        return
    with ExitStack() as stack:
        for kind in active:
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(_on_the_host())
        yield
    if active:
        torch.clear_autocast_cache()


@contextmanager
def learning(*, on_host: bool = True) -> Iterator[None]:
    """What gradients need, also in evaluation code: they are recorded, there is no inference mode.

    With `on_host` the CPU is the default device inside; without, only where the caller's is "meta", without numbers.

    >>> with torch.inference_mode(), learning():
    ...     torch.ones(1, requires_grad=True).mul(2).requires_grad
    True
    """
    meta = torch.get_default_device().type == "meta"  # for the forward passes inside too
    host = torch.device("cpu") if meta else _on_the_host() if on_host else nullcontext()
    with torch.inference_mode(False), torch.enable_grad(), host:
        yield


@contextmanager
def _on_the_host() -> Iterator[None]:
    default = torch.get_default_device()
    if default.type == "cpu":
        yield
        return
    with ExitStack() as stack:
        stack.callback(_CALLERS.reset, _CALLERS.set(default))
        stack.enter_context(torch.device("cpu"))
        yield


@contextmanager
def callers_device() -> Iterator[None]:
    """The caller's default device again, for a forward pass of their model.

    >>> with torch.device("meta"), full_precision(), callers_device():
    ...     torch.ones(1).device
    device(type='meta')
    """
    device = _CALLERS.get()
    if device is None:
        yield
        return
    with torch.device(device):
        yield


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same tensors on the CPU, in their dtypes; those of an accelerator come in one copy of bytes per device.

    >>> to_host([torch.tensor([1, 2]), torch.tensor(True)])
    [tensor([1, 2]), tensor(True)]
    """
    found = list(tensors)
    devices: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if tensor.device.type != "cpu":
            devices.setdefault(tensor.device, []).append(i)
    for members in devices.values():
        together = torch.cat([tensors[i].detach().flatten().contiguous().view(torch.uint8) for i in members]).cpu()
        for i, part in zip(members, torch.split(together, [tensors[i].nbytes for i in members]), strict=True):
            found[i] = part.clone().view(tensors[i].dtype).reshape(tensors[i].shape)
    return found


@lru_cache(maxsize=16)
def has_float64(device: torch.device) -> bool:
    """Whether a device computes in float64; Apple's MPS and some others do not.

    >>> has_float64(torch.device("cpu"))
    True
    """
    try:
        torch.ones(1, dtype=torch.float64, device=device).sqrt()
    except (TypeError, RuntimeError):
        return False
    return True


def for_lapack(x: Tensor) -> Tensor:
    """The same where float64 and decompositions are to be had: on its device, or on the CPU if the device has none.

    >>> for_lapack(torch.ones(1)).device
    device(type='cpu')
    """
    return x if has_float64(x.device) else x.cpu()


def to_float64(x: Tensor) -> Tensor:
    """The same in float64, on the CPU if its device has none.

    >>> to_float64(torch.ones(1))
    tensor([1.], dtype=torch.float64)
    """
    return for_lapack(x).double()


def _enabled(kind: str) -> bool:
    try:
        return torch.is_autocast_enabled(kind)
    except RuntimeError:  # a device that this build of torch does not know
        return False
