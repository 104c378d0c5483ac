"""On-disk names of a transformers model whose live names differ: the library's own mapping, read and not repeated.

transformers 5 renames weights while it loads them, and merges some (one tensor per expert on disk, one stack in
memory). `converted(model, keys)` says for each key of a file what becomes of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

# Operations that put whole matrices side by side: each tensor on disk is one of the matrices in memory.
_WHOLE = {"MergeModulelist", "Concatenate"}


@dataclass(frozen=True)
class Converted:
    """The live name of a tensor on disk, and the operations that it goes through; none if it is only renamed."""

    name: str
    operations: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether the tensor's rows and columns are those of a matrix in memory."""
        return set(self.operations) <= _WHOLE


def converted(model: nn.Module, keys: Iterable[str]) -> dict[str, Converted]:
    """What loading makes of each key; empty for a model that is not of transformers, or of a version before 5.

    >>> converted(nn.Linear(1, 1), ["weight"])
    {}
    """
    if not any(c.__name__ == "PreTrainedModel" for c in type(model).__mro__):
        return {}
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:
        return {}
    whole: Any = model
    steps = get_model_conversion_mapping(whole)
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    live = whole.state_dict()
    found = {}
    for key in keys:
        name, pattern = rename_source_key(key, renamings, converters, whole.base_model_prefix, live)
        operations: tuple[str, ...] = ()
        if pattern is not None:
            converter = by_pattern.get(pattern)
            # A pattern that cannot be traced back to its converter stands for an operation that nobody knows.
            operations = ("?",) if converter is None else tuple(type(o).__name__ for o in converter.operations)
        if name in live:
            found[key] = Converted(name, operations)
    return found
