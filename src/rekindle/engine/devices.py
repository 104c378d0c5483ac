"""What surrounds the arithmetic: modes that the caller has switched on, and the way from a device to the host.

`torch.autocast` casts every product to bfloat16 or float16, also those of a solver that promises six digits, and
`torch.set_default_device` makes small helper tensors on another device than the weights. Verbs that compute on weights
are wrapped in `full_precision()`, which also works as a decorator.

On an accelerator every `float(tensor)` lets the host wait until all work before it is done. What is asked of many
matrices is therefore kept as tensors, and `to_host` fetches them together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

# The default device of whoever called the outermost verb, where it was changed.
_CALLERS: ContextVar[torch.device | None] = ContextVar("callers_device", default=None)
_DEVICES = ("cpu", "cuda", "mps", "xpu", "mtia", "hpu")


@contextmanager
def full_precision() -> Iterator[None]:
    """Autocast off on every device and the CPU as default device inside; nothing happens where that is so already.

    Weights that are written inside must not live on in autocast's cache of cast copies, so that is emptied.

    >>> w = torch.eye(2)
    >>> with torch.autocast("cpu"), full_precision():
    ...     (w @ w).dtype
    torch.float32
    """
    active = [kind for kind in _DEVICES if _enabled(kind)]
    elsewhere = torch.get_default_device().type != "cpu"
    if not active and not elsewhere:
        yield
        return
    with ExitStack() as stack:
        for kind in active:
            stack.enter_context(torch.autocast(kind, enabled=False))
        if elsewhere:
            stack.callback(_CALLERS.reset, _CALLERS.set(torch.get_default_device()))
            stack.enter_context(torch.device("cpu"))
        yield
    if active:
        torch.clear_autocast_cache()


@contextmanager
def callers_device() -> Iterator[None]:
    """The caller's default device again, for a forward pass of their model inside `full_precision`.

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
    """The same tensors on the CPU, in their dtypes; those of an accelerator come in one copy per device.

    They travel as float64, which holds integers up to 2⁵³ exactly.

    >>> to_host([torch.tensor([1, 2]), torch.tensor(True)])
    [tensor([1, 2]), tensor(True)]
    """
    found = list(tensors)
    devices: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if tensor.device.type != "cpu":
            devices.setdefault(tensor.device, []).append(i)
    for members in devices.values():
        together = torch.cat([tensors[i].detach().double().flatten() for i in members]).cpu()
        for i, part in zip(members, torch.split(together, [tensors[i].numel() for i in members]), strict=True):
            found[i] = part.reshape(tensors[i].shape).to(tensors[i].dtype)
    return found


def _enabled(kind: str) -> bool:
    try:
        return torch.is_autocast_enabled(kind)
    except RuntimeError:  # a device that this build of torch does not know
        return False
