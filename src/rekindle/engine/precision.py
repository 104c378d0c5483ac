"""Library arithmetic runs as written, whatever the caller has switched on around it.

`torch.autocast` casts every product to bfloat16 or float16, also those of a solver that promises six digits, and
`torch.set_default_device` makes small helper tensors on another device than the weights. Verbs that compute on weights
are wrapped in `full_precision()`, which also works as a decorator.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

import torch

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


def _enabled(kind: str) -> bool:
    try:
        return torch.is_autocast_enabled(kind)
    except RuntimeError:  # a device that this build of torch does not know
        return False
