"""A setting and a run of it.

A setting is one stream, one network and one way of training, which every arm of a comparison shares. A run is one arm
in one setting with one seed: it is found by its `identity`, a hash of its whole configuration. Its results also carry
`code`, the declared version of what they depend on: results of another version are shown as such and made again. The
state after a first task is kept, for other runs may share it.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
import pickle
import platform
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rekindle import __version__, files
from rekindle.lab import networks, protocols, streams
from rekindle.lab.agents import STREAMS as AGENT_STREAMS
from rekindle.lab.agents import AgentStream
from rekindle.lab.agents import stream as agent_stream
from rekindle.lab.arms import Arm
from rekindle.lab.sources import Stream, derive, replay

HEADLINES = ("online_accuracy", "online_loss", "train_accuracy", "train_loss", "test_accuracy", "test_loss")
RETURNS = ("return", "online_return")
OPTIMIZERS = ("adam", "adamw", "sgd", "muon")


@dataclass(frozen=True)
class Setting:
    """Everything about a comparison but the remedy. All fields can be written as JSON.

    >>> setting = Setting("tiny", "random-labels", "mlp", stream_options={"tasks": 2, "epochs": 1})
    >>> Setting.from_dict(setting.to_dict()) == setting
    True

    Args:
        name: What it is called.
        stream: A stream by name.
        network: A network by name; for agents "dqn", "sac", "td3", "ppo" or "a2c".
        stream_options: Options of the stream.
        network_options: Options of the network.
        batch: Examples per step.
        optimizer: "adam", "adamw", "sgd" or "muon".
        lr: The learning rate.
        optimizer_options: Options of the optimizer.
        clip: The largest norm of the gradient.
        warmup: The share of each task in which the learning rate rises to `lr`.
        schedule: "constant" or "cosine".
        new_optimizer: A new optimizer at every task, for every arm alike, as in the paper's vision protocol.
        recalibrate: BatchNorm statistics are estimated anew at every boundary, for every arm alike.
        norm: Each weight that a normalization follows is brought to this many times the norm of its start, at every
            boundary after the remedy, for every arm alike: all arms then have the same effective learning rate.
        spare_first: Remedies that act while training (losses, steps, epochs) begin with the second task, as in the
            paper's warm start, so that all arms share the first.
        headline: The metric that arms are compared by; for agents "return" (the mean of the episodes that end in the
            second half of a task) or "online_return" (of all).
        last: How many of the last tasks it is averaged over.
        replay: The share of every earlier task's data that is mixed into each task.
        evaluate: How many rows an evaluation looks at, at most.
        health: Whether the network's health is measured after each task.
        coefficients: Options of an arm in this setting, by the arm's name; an arm's own options win.
        source: A Python file that registers streams, networks or arms of your own; it is run before the setting is.
        about: One line for people.
    """

    name: str
    stream: str
    network: str
    stream_options: Mapping[str, Any] = field(default_factory=dict)
    network_options: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 128
    optimizer: str = "adam"
    lr: float = 1e-3
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    clip: float | None = None
    warmup: float = 0.0
    schedule: str = "constant"
    new_optimizer: bool = True
    recalibrate: bool = False
    norm: float | None = None
    spare_first: bool = False
    headline: str = "online_accuracy"
    last: int = 3
    replay: float = 0.0
    evaluate: int = 2000
    health: bool = True
    coefficients: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    source: str | None = None
    about: str = ""

    def __post_init__(self) -> None:
        allowed = {"optimizer": OPTIMIZERS, "schedule": ("constant", "cosine"), "headline": (*HEADLINES, *RETURNS)}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"setting {self.name!r}: {name}={getattr(self, name)!r} is not one of {list(values)}")
        for name in ("batch", "last", "evaluate", "lr"):
            value, kind = getattr(self, name), float if name == "lr" else int
            if not isinstance(value, int | kind) or isinstance(value, bool) or value <= 0:
                what = "a number" if kind is float else "a whole number"
                raise ValueError(f"setting {self.name!r}: {name}={value!r} must be {what} above zero")
        for name in ("warmup", "replay"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ValueError(f"setting {self.name!r}: {name}={value!r} is a share, from 0 to 1")
        if self.norm is not None and (not isinstance(self.norm, int | float) or self.norm <= 0):
            raise ValueError(f"setting {self.name!r}: norm={self.norm!r} must be a number above zero")
        if self.norm is not None and (self.agents or not self.new_optimizer):
            raise ValueError(
                f"setting {self.name!r}: norm={self.norm!r} needs a network, not an agent, and a new optimizer per task"
            )

    @property
    def agents(self) -> bool:
        """Whether an agent learns it (`rekindle.lab.agents`), judged by its return."""
        return self.stream in AGENT_STREAMS or self.headline in RETURNS

    @property
    def falling(self) -> bool:
        """Whether less is better: the headline is a loss."""
        return self.headline.endswith("loss")

    def make_stream(self, seed: int) -> Stream:
        """The stream that a run of this seed sees."""
        made = streams.stream(self.stream, derive(seed, "stream"), **self.stream_options)
        return replay(made, self.replay, seed=derive(seed, "replay"))

    def make_agent_stream(self, seed: int) -> AgentStream:
        """The same for agents."""
        return agent_stream(self.stream, derive(seed, "stream"), **self.stream_options)

    def make_network(self, stream: Stream, seed: int) -> nn.Module:
        """The network that a run of this seed starts with."""
        start = derive(seed, "network")
        return networks.network(
            self.network, shape=stream.shape, classes=stream.classes, seed=start, **self.network_options
        )

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON holds them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Setting:
        """A setting from what `to_dict` gave, or from a study's file."""
        known = {f.name for f in fields(cls)}
        for name in data:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                raise ValueError(
                    f"a setting has no field {name!r}; " + (f"did you mean {close[0]!r}?" if close else str(known))
                )
        return cls(**data)


SETTINGS: dict[str, Setting] = {fields["name"]: Setting.from_dict(fields) for fields in protocols.named()}


def setting(name: str) -> Setting:
    """The named setting.

    >>> setting("random-labels").batch
    32

    Args:
        name: One of `SETTINGS`.
    """
    if name not in SETTINGS:
        close = difflib.get_close_matches(name, SETTINGS, 1)
        known = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(SETTINGS)}"
        raise ValueError(f"there is no setting {name!r}; {known}")
    return SETTINGS[name]


def read_source(path: str | Path) -> object:
    """Run a user's file once, so that the streams, networks and arms in it are registered; its module.

    The file is run again only if its content has changed.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise FileNotFoundError(f"source={str(path)!r}: there is no such file")
    name = f"rekindle_source_{source_hash(file)}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise ValueError(f"source={str(path)!r} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[name]
            if not isinstance(error, Exception):
                raise
            # With a separate message, so that a package that the user's file needs is not taken for one of the
            # laboratory.
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
            place = f"{file.name}, line {lines[-1]}" if lines else file.name
            kind = next((each for each in (ImportError, ValueError) if isinstance(error, each)), RuntimeError)
            raise kind(f"{place}: {type(error).__name__}: {error}") from error
    return sys.modules[name]


def source_hash(path: str | Path) -> str:
    """A hash of the file's content: runs of an edited file are other runs."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


FORMAT = 1  # of the rows; results of another format are other results

REVISION = 1
"""Raised by hand when a correction changes the results of all runs; one that concerns a single method raises that
method's own `revision`."""

_AFTERWARDS = ("name", "norm", "recalibrate", "headline", "last")


@dataclass(frozen=True)
class Run:
    """One arm in one setting with one seed.

    >>> run = Run(Setting("tiny", "random-labels", "mlp"), Arm("fire", "FIRE"), seed=0)
    >>> Run.from_dict(run.to_dict()).identity == run.identity
    True

    Args:
        setting: What is learned, by what, and how.
        arm: The remedy.
        seed: Decides data, their order and the first weights, whatever the arm.
    """

    setting: Setting
    arm: Arm
    seed: int

    @cached_property
    def identity(self) -> str:
        """A hash of the configuration that the results depend on, the content of the user's file included."""
        arm = self.arm.within(self.setting).to_dict()
        del arm["tuning"], arm["about"]
        return _hash({**self.first_task(), "arm": arm})

    @cached_property
    def code(self) -> str:
        """The declared version of what the results depend on: the laboratory's, and the method's where it has one."""
        own = [(maker.__name__, getattr(maker, "revision", 0)) for maker in self.arm.makers()]
        return ", ".join([f"lab {REVISION}", *(f"{name} {number}" for name, number in own if number)])

    def first_task(self) -> dict[str, Any]:
        """What the first task depends on for an arm that acts at boundaries only."""
        setting = self.setting.to_dict()
        del setting["coefficients"], setting["about"]  # those of this arm are in its options
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
        return _hash(self._until_boundary())

    def saved_first_task(self, folder: Path) -> FirstTask:
        """Where the state after the first task is kept for all runs that do the same until then."""
        return FirstTask(folder, {**self._until_boundary(), "code": REVISION})

    def _until_boundary(self) -> dict[str, Any]:
        """The first task without what a setting only calls itself, does at boundaries or reads off in the end."""
        about = self.first_task()
        setting = {name: value for name, value in about["setting"].items() if name not in _AFTERWARDS}
        return {**about, "setting": setting}

    def start_row(self, stream: Mapping[str, Any], parameters: int, *packages: str) -> dict[str, Any]:
        """The first row of its file: what it is, and the versions of what made it, of these packages too."""
        made = {"rekindle": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
        return {
            "kind": "start",
            "identity": self.identity,
            "code": self.code,
            "run": self.to_dict(),
            "versions": made | {name: version(name) for name in packages},
            "stream": dict(stream),
            "parameters": parameters,
        }

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON holds it."""
        return {"setting": self.setting.to_dict(), "arm": self.arm.to_dict(), "seed": self.seed}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Run:
        """A run from what `to_dict` gave."""
        return cls(Setting.from_dict(data["setting"]), Arm.from_dict(data["arm"]), int(data["seed"]))


class FirstTask:
    """The state after a first task: a file named by the hash of all that it depends on.

    A remedy that acts at boundaries has done nothing during the first task: two such arms of one setting and seed are
    bit for bit equal there. What is kept is the network, the optimizers where they live on, and the task's row.
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
        """Write to a temporary file and rename, so that another process sees all of it or nothing."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(self.path) as file:
            torch.save(dict(state), file)


def _hash(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:20]
