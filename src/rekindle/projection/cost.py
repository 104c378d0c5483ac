"""What an application costs: time and peak memory, read without disturbing whoever else measures."""

from __future__ import annotations

import sys
import time

import torch


class Meter:
    """Time and peak memory from its creation on, for the last two lines of a receipt.

    >>> meter = Meter()
    >>> meter.seconds > 0, meter.memory >= 0
    (True, True)
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._peak = _peak()

    @property
    def seconds(self) -> float:
        """Wall time since the start."""
        return time.perf_counter() - self._start

    @property
    def memory(self) -> int:
        """Bytes by which the peak of the process and its CUDA devices grew since the start."""
        return max(0, _peak() - self._peak)


def _peak() -> int:
    # Kernel and allocator keep their own peaks; resetting them would disturb whoever else measures.
    try:
        import resource
    except ImportError:  # Windows
        resident = 0
    else:
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        resident += sum(torch.cuda.max_memory_allocated(device) for device in range(torch.cuda.device_count()))
    return resident
