"""Ctrl-C: whether it was pressed, also where a library under us caught it while it was being imported."""

from __future__ import annotations

from types import FrameType

pressed: list[int] = []


def press(number: int, frame: FrameType | None) -> None:
    """The handler of SIGINT while a command runs: remember it, and interrupt as Python does."""
    pressed.append(number)
    raise KeyboardInterrupt
