"""What the first batch shows, for verbs that are given batches: the recording is made when somebody asks for it.

>>> import torch
>>> from rekindle.blocks.finding import find
>>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
>>> with knowing(net, [torch.zeros(4, 2)]):
...     [found.evidence for found in find(net) if found.blocks]
['recorded', 'recorded']
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

from torch import distributed, nn

from rekindle.blocks.evidence import Facts, using
from rekindle.blocks.names import unwrapped
from rekindle.isolation import Recorded, random_states_kept
from rekindle.recording.facts import facts_of
from rekindle.recording.recorder import Recorder, RecordingError, record

Run = Callable[[nn.Module, Any], Any]


def knowing(model: nn.Module, batches: Iterable[Any] | None, run: Run | None = None) -> AbstractContextManager[None]:
    """Inside, whoever looks for the matrices of this model knows what the first of these batches shows.

    Nothing changes where the model does not run on it, or where a recording is known already. Processes that train
    together have different batches and must find the same: there it is the first training step that shows it.

    run: `run(model, batch)`, tried where `model(batch)` does not go: a loss.
    """
    core = unwrapped(model)
    return using(core, cache(lambda: first_shown(core, batches, run)))


def first_shown(model: nn.Module, batches: Iterable[Any] | None, run: Run | None = None) -> Facts | None:
    """What the first of these batches shows, None where it cannot be known."""
    together = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    if batches is None or together:
        return None
    with random_states_kept():  # a loader draws its order from the global states
        if iter(batches) is batches:  # an iterator is the caller's to read
            return None
        batch = next(iter(batches), None)
        parts = [each for each in batches if each.part is not None] if isinstance(batch, Recorded) else []
    for way in (None, run) if batch is not None else ():
        try:
            if not parts:
                return facts_of(record(model, batch, way))
            recorder = Recorder(model)
            for each in parts:  # a model that is never called itself shows itself by its parts
                record(model, each, recorder=recorder)
            return facts_of(recorder.graph)
        except RecordingError:
            continue
    return None
