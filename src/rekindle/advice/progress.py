"""The time of a probe or of advice: how much it may take, and how far it is (a line, renewed on a terminal)."""

from __future__ import annotations

import re
import sys
from time import perf_counter

QUIET = 5.0  # seconds before the first plain line, and between two


class Progress:
    """Writes to stderr what is done and about how many seconds are left.

    wanted: True and False switch it on and off; None shows it on a terminal, and elsewhere after five seconds.

    >>> progress = Progress(False)
    >>> progress.show("seed 1 of 3", 0.3)
    >>> progress.close()
    """

    def __init__(self, wanted: bool | None) -> None:
        self._began = self._last = perf_counter()
        self._renewed = sys.stderr.isatty()
        self._shown = wanted is not False
        self._patience = 0.0 if wanted or self._renewed else QUIET

    def show(self, text: str, done: float) -> None:
        """Say it; `done` is the share of the work."""
        now = perf_counter()
        if not self._shown or now - self._last < self._patience:
            return
        self._last = now
        left = (now - self._began) * (1 / done - 1) if done > 0 else 0.0
        line = f"{text}, about {left:.0f} s left"
        sys.stderr.write(f"\r{line}\x1b[K" if self._renewed else f"{line}\n")
        sys.stderr.flush()

    def close(self) -> None:
        """Clear the renewed line."""
        if self._shown and self._renewed:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def seconds_of(budget: float | str) -> float:
    """A budget in seconds.

    >>> seconds_of("2m"), seconds_of("1.5h"), seconds_of(30)
    (120.0, 5400.0, 30.0)
    """
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([smh]?)\s*", budget) if isinstance(budget, str) else None
    seconds = float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]] if found else budget
    if isinstance(seconds, str) or not seconds > 0:
        raise ValueError(f'budget={budget!r} is not a time: give seconds, or a text such as "90s", "2m", "1h"')
    return float(seconds)
