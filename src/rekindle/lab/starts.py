"""The state after the first task, kept so that arms that do the same until then need to do it only once.

A remedy that acts at boundaries has done nothing during the first task: two such arms of one setting and seed are bit
for bit equal there. What is kept is the network, the optimizers where they live on, and the task's row.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


class Start:
    """One kept state: a file named by the hash of all that it depends on.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     start = Start(Path(folder), {"setting": "tiny", "seed": 0})
    ...     print(start.load())
    ...     start.save({"row": {"task": 0}})
    ...     print(start.load())
    None
    {'row': {'task': 0}}
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        text = json.dumps(about, sort_keys=True)
        self.path = Path(folder) / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.pt"

    def load(self) -> dict[str, Any] | None:
        """What was kept; None where there is nothing, or nothing that can be read."""
        try:
            kept: dict[str, Any] = torch.load(self.path, weights_only=True)
        except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError):
            return None
        return kept

    def save(self, state: Mapping[str, Any]) -> None:
        """Write beside and rename, so that another process sees all of it or nothing."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=self.path.parent, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                torch.save(dict(state), file)
            os.replace(beside, self.path)
        except BaseException:
            Path(beside).unlink(missing_ok=True)
            raise
