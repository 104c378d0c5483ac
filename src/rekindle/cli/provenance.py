"""Where a result comes from: which file, which command, which versions. Goes into JSON and onto the page."""

from __future__ import annotations

import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy
import torch

import rekindle
from rekindle.checkpoint import Checkpoint


def made(command: str) -> dict[str, Any]:
    """The frame of every result.

    >>> made("inspect")["command"]
    'inspect'
    """
    return {
        "rekindle": rekindle.__version__,
        "command": command,
        "made": {
            "line": " ".join(map(shlex.quote, ["rekindle", *sys.argv[1:]])),
            "versions": {
                "rekindle": rekindle.__version__,
                "torch": torch.__version__,
                "numpy": numpy.__version__,
                "python": platform.python_version(),
            },
            "platform": platform.platform(),
            "threads": torch.get_num_threads(),
        },
    }


def described(checkpoint: Checkpoint) -> dict[str, Any]:
    """What was read."""
    tensors, path = checkpoint.meta_tensors(), Path(checkpoint.path)
    return {
        "path": str(path),
        "name": path.resolve().name,
        "format": checkpoint.format,
        "tensors": len(checkpoint.names),
        "numbers": sum(tensor.numel() for tensor in tensors.values()),
        "bytes": sum(file.stat().st_size for file in checkpoint.files()),
        "dtypes": sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}),
    }
