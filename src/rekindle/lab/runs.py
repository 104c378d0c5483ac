"""One run: what it is, what its results depend on, and the state after its first task, which other runs may share.

A run is found by its `identity`, a hash of its whole configuration. Its results also carry `code`, a hash of the code
that they depend on: results made by other code are shown as such and made again.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import json
import os
import pickle
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

import rekindle
from rekindle.lab import networks, streams
from rekindle.lab.agents import streams as agent_streams
from rekindle.lab.arms import Arm, from_stored, stored_form
from rekindle.lab.settings import Setting, read_source, source_hash

FORMAT = 1  # of the rows; results of another format are other results

REVISION = 1
"""Raised by hand when a correction beneath the modules that are hashed (the polar factor, the plan) changes results of
all runs; one that concerns a single method raises that method's own `revision`."""

_LOOP = ("rekindle.lab.train", "rekindle.lab.evaluation", "rekindle.lab.sources")
_AGENTS = tuple(f"rekindle.lab.agents.{name}" for name in ("learning", "building", "environments", "state"))
_NOT_OURS = ("builtins", "abc", "typing", "torch")


@dataclass(frozen=True)
class Run:
    """One arm in one setting with one seed.

    >>> run = Run(Setting("tiny", "random-labels", "mlp"), Arm("fire", "FIRE"), seed=0)
    >>> Run.from_dict(run.to_dict()).identity == run.identity
    True
    """

    setting: Setting
    arm: Arm
    seed: int

    @cached_property
    def identity(self) -> str:
        """A hash of the configuration that the results depend on, the content of the user's file included."""
        return _hash({**self.first_task(), "arm": stored_form(self.arm.within(self.setting))})

    @cached_property
    def code(self) -> str:
        """A hash of the code that the results depend on: the loop, the stream, the network and the method.

        Comments, docstrings and formatting do not count. Of the method, the modules of its class and bases do.
        """
        made: list[Any] = [*self.arm.makers()] or [None]
        parts = [[_modules(maker), getattr(maker, "revision", 0)] for maker in made]
        return _hash([self._shared_code(), *parts[0], *parts[1:]])

    def first_task(self) -> dict[str, Any]:
        """What the first task depends on for an arm that acts at boundaries only."""
        # `targets` and `heads` were fields once: what was run then is still the same.
        setting = self.setting.to_dict() | {"targets": "auto", "heads": True}
        del setting["coefficients"], setting["about"]  # those of this arm are in its options
        if not setting["spare_first"]:
            del setting["spare_first"]  # came later: what was run before it is still the same
        source = setting.pop("source")
        return {
            "format": FORMAT,
            "setting": setting,
            "source": None if source is None else source_hash(source),
            "seed": self.seed,
            "optimizer": [self.arm.optimizer, dict(self.arm.optimizer_options), self.arm.lr],
        }

    @cached_property
    def first_task_key(self) -> str:
        """The same for runs that may share the state after their first task."""
        return _hash(self.first_task())

    def saved_first_task(self, folder: Path) -> FirstTask:
        """Where the state after the first task is kept for all runs that do the same until then."""
        return FirstTask(folder, {**self.first_task(), "code": self._shared_code()})

    def _shared_code(self) -> list[Any]:
        """What every arm of a setting depends on."""
        if self.setting.source is not None:
            read_source(self.setting.source)
        if self.setting.agents:
            made = agent_streams.STREAMS.get(self.setting.stream)
            return [
                REVISION,
                *(_source(name) for name in _AGENTS),
                _modules(made),
                _source("rekindle.integrations.sb3"),
            ]
        stream, network = streams.STREAMS.get(self.setting.stream), networks.builder(self.setting.network)
        return [REVISION, *(_source(name) for name in _LOOP), _modules(stream), _modules(network)]

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON holds it."""
        return {"setting": self.setting.to_dict(), "arm": self.arm.to_dict(), "seed": self.seed}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Run:
        """A run from what `to_dict` gave."""
        arm = Arm.from_dict(from_stored(data["arm"], data["setting"]))
        return cls(Setting.from_dict(data["setting"]), arm, int(data["seed"]))


class FirstTask:
    """The state after a first task: a file named by the hash of all that it depends on.

    A remedy that acts at boundaries has done nothing during the first task: two such arms of one setting and seed are
    bit for bit equal there. What is kept is the network, the optimizers where they live on, and the task's row.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     first = FirstTask(Path(folder), {"setting": "tiny", "seed": 0})
    ...     print(first.load())
    ...     first.save({"row": {"task": 0}})
    ...     print(first.load())
    None
    {'row': {'task': 0}}
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self.path = Path(folder) / f"{_hash(about)[:16]}.pt"

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


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _modules(made: Any) -> list[str]:
    """The code of the modules that define a class with its bases, or a function."""
    kinds: Iterable[Any] = inspect.getmro(made) if inspect.isclass(made) else [] if made is None else [made]
    names = {getattr(kind, "__module__", "builtins") for kind in kinds}
    return [_source(name) for name in sorted(names) if name.partition(".")[0] not in _NOT_OURS]


@cache
def _source(module: str) -> str:
    """A hash of a module's code without comments and docstrings; of the version where there is no source."""
    try:
        spec = importlib.util.find_spec(module)
        tree = ast.parse(Path(str(spec and spec.origin)).read_bytes())
    except (OSError, ValueError, SyntaxError):
        return rekindle.__version__
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()
