"""Ctrl-C: whether it was pressed, also where a library under us caught it while it was being imported."""

from __future__ import annotations

import os
import sys
from types import FrameType

pressed: list[int] = []
_COMPILED = ("torch", "numpy")  # the start of their C++ turns an exception into an abort


def press(number: int, frame: FrameType | None) -> None:
    """The handler of SIGINT while a command runs: remember it, and interrupt as Python does.

    While torch is being imported nothing has begun that could be left half done: end at once.
    """
    pressed.append(number)
    if any(_being_imported(name) for name in _COMPILED):
        os.write(2, b"stopped\n")
        os._exit(130)
    raise KeyboardInterrupt


def _being_imported(name: str) -> bool:
    """Whether an import of this package has begun and not ended.

    >>> _being_imported("os"), _being_imported("no_such_package")
    (False, False)
    """
    return bool(getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False))
