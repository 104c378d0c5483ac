"""What this machine is: its CPU, its cores, whether bfloat16 products work. Imports torch only for torch's own view.

Some virtual machines report AMX units that a process may not use. torch trusts the report, and the first product of
bfloat16 matrices ends the process with SIGILL, which no `except` can catch. So a child process tries one, where the CPU
reports bfloat16 units; other CPUs compute such products in float32, and nothing is tested.

    fault = bfloat16_fault()
    if fault: raise ValueError(f"Muon multiplies in bfloat16: {fault}")
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

WAY_OUT = ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
"""The environment variable that keeps oneDNN off AMX, and its value; to be set before the first product."""

_ANSWER = "REKINDLE_BFLOAT16"  # the result, for child processes: they need not test again
_INFO = Path("/proc/cpuinfo")
_WINDOWS_CRASH = 0xC0000000  # there a process that crashed has a positive exit code, from this one on
_PRODUCT = """
import torch
x = torch.ones(64, 64, dtype=torch.bfloat16)
torch.nn.functional.linear(x, x)
assert float((x @ x)[0, 0]) == 64
"""


def cores() -> int:
    """How many cores this process may use.

    >>> cores() >= 1
    True
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def may_fork() -> bool:
    """Whether a process that has torch loaded may be forked: not on Windows, nor on macOS, whose libraries forbid it.

    >>> isinstance(may_fork(), bool)
    True
    """
    return hasattr(os, "fork") and sys.platform != "darwin"


def vendor() -> str:
    """The vendor name that this CPU reports; "unknown" where it reports none.

    >>> isinstance(vendor(), str)
    True
    """
    facts = _facts()
    return facts.get("vendor_id") or facts.get("CPU implementer") or platform.processor() or "unknown"


def capability() -> str:
    """The vector instructions that torch uses here: AVX512, AVX2, DEFAULT or what other kinds of CPU have."""
    import torch

    return torch.backends.cpu.get_cpu_capability()


def bfloat16_fault() -> str | None:
    """Why a product of bfloat16 matrices cannot be computed on this CPU, with the workaround; None if it can.

    A child process tests it once: the result is kept for this process and, in an environment variable, for its
    children.

    >>> bfloat16_fault() is None or "ONEDNN_MAX_CPU_ISA" in bfloat16_fault()
    True
    """
    limit = os.environ.get(WAY_OUT[0], "")
    known, _, answer = os.environ.get(_ANSWER, "").partition("=")
    if not answer or known != limit:  # with another limit the result may differ
        answer = _asked(limit)
        os.environ[_ANSWER] = f"{limit}={answer}"
    if answer == "works":
        return None
    return (
        f"a product of bfloat16 matrices on this CPU ends the process with {answer}; the machine announces units "
        f"that it does not have. Set {'='.join(WAY_OUT)} before Python starts"
    )


@lru_cache(maxsize=8)
def _asked(limit: str) -> str:
    """ "works", or the name of the signal that ended the trial."""
    if not _announces_bfloat16():
        return "works"
    code = _trial()
    if code >= _WINDOWS_CRASH:
        return f"the status {code:#x}"
    if code >= 0:  # an ordinary error, such as too little memory for a second torch, says nothing about the CPU
        return "works"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _trial() -> int:
    """The exit code of a child process that multiplies bfloat16 matrices; negative if a signal ended it."""
    return subprocess.run([sys.executable, "-c", _PRODUCT], capture_output=True, check=False).returncode


def _announces_bfloat16() -> bool:
    """Whether the CPU reports bfloat16 units; true where its flags cannot be read."""
    facts = _facts()
    flags = facts.get("flags") or facts.get("Features")
    return flags is None or any("bf16" in flag for flag in flags.split())


def _facts() -> dict[str, str]:
    try:
        text = _INFO.read_text(encoding="utf-8")
    except OSError:  # not Linux, or a container that hides it
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
