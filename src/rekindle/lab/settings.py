"""A setting: one stream, one network and one way of training, which every arm of a comparison shares."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import nn

from rekindle.lab import networks, protocols, streams
from rekindle.lab.agents import streams as agent_streams
from rekindle.lab.sources import Stream, derive, replay

HEADLINES = ("online_accuracy", "online_loss", "train_accuracy", "train_loss", "test_accuracy", "test_loss")
RETURNS = ("return", "online_return")
OPTIMIZERS = ("adam", "adamw", "sgd", "muon")


@dataclass(frozen=True)
class Setting:
    """Everything about a comparison but the remedy. All fields can be written as JSON.

    warmup: the share of each task in which the learning rate rises to `lr`.
    new_optimizer: a new optimizer at every task, for every arm alike, as in the paper's vision protocol.
    recalibrate: BatchNorm statistics are estimated anew at every boundary, for every arm alike.
    spare_first: remedies that act while training (losses, steps, epochs) begin with the second task, as in the
        paper's warm start, so that all arms share the first.
    headline: the metric that arms are compared by, averaged over the `last` tasks; for agents "return" (the mean of
        the episodes that end in the second half of a task) or "online_return" (of all).
    replay: the share of every earlier task's data that is mixed into each task.
    evaluate: how many rows an evaluation looks at, at most.
    coefficients: options of an arm in this setting, by the arm's name; an arm's own options win.
    source: a Python file that registers streams, networks or arms of your own; it is run before the setting is.

    >>> setting = Setting("tiny", "random-labels", "mlp", stream_options={"tasks": 2, "epochs": 1})
    >>> Setting.from_dict(setting.to_dict()) == setting
    True
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
                raise ValueError(f"setting {self.name!r}: {name}={getattr(self, name)!r} is none of {list(values)}")
        for name in ("batch", "last", "evaluate", "lr"):
            value, kind = getattr(self, name), float if name == "lr" else int
            if not isinstance(value, int | kind) or isinstance(value, bool) or value <= 0:
                what = "a number" if kind is float else "a whole number"
                raise ValueError(f"setting {self.name!r}: {name}={value!r} must be {what} above zero")
        for name in ("warmup", "replay"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ValueError(f"setting {self.name!r}: {name}={value!r} is a share, from 0 to 1")

    @property
    def agents(self) -> bool:
        """Whether an agent learns it (`rekindle.lab.agents`), judged by its return."""
        return self.stream in agent_streams.STREAMS or self.headline in RETURNS

    @property
    def falling(self) -> bool:
        """Whether less is better: the headline is a loss."""
        return self.headline.endswith("loss")

    def make_stream(self, seed: int) -> Stream:
        """The stream that a run of this seed sees."""
        made = streams.stream(self.stream, derive(seed, "stream"), **self.stream_options)
        return replay(made, self.replay, seed=derive(seed, "replay"))

    def make_agent_stream(self, seed: int) -> agent_streams.AgentStream:
        """The same for agents."""
        return agent_streams.stream(self.stream, derive(seed, "stream"), **self.stream_options)

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
        """A setting from what `to_dict` gave, or from a study's file.

        `targets` and `heads`, which settings had once, become options of the matrix methods.
        """
        data = dict(data)
        targets, heads = data.pop("targets", "auto"), data.pop("heads", True)
        if (targets, heads) != ("auto", True):
            listed = [targets] if isinstance(targets, str) else list(targets)
            own = protocols.touching([*listed, "head"] if heads else listed)
            data["coefficients"] = {**own, **data.get("coefficients", {})}
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
    """
    if name not in SETTINGS:
        close = difflib.get_close_matches(name, SETTINGS, 1)
        known = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(SETTINGS)}"
        raise ValueError(f"there is no setting {name!r}; {known}")
    return SETTINGS[name]


def read_source(path: str | Path) -> Any:
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
            raise ValueError(f"source={str(path)!r} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[name]
            if not isinstance(error, Exception):
                raise
            # In words of its own, so that a package which the user's file lacks is not taken for one of the laboratory.
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
            place = f"{file.name}, line {lines[-1]}" if lines else file.name
            kind = next((each for each in (ImportError, ValueError) if isinstance(error, each)), RuntimeError)
            raise kind(f"{place}: {type(error).__name__}: {error}") from error
    return sys.modules[name]


def source_hash(path: str | Path) -> str:
    """A hash of the file's content: runs of an edited file are other runs."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
