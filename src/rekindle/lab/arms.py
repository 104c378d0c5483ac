"""The arms of a comparison: a remedy with its options and when it is applied. Every arm is a small dataclass.

An arm names a method of `rekindle.methods` (or one that `register` added), so that a run can be written down, hashed
and sent to another machine; `build` makes the method itself.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Protocol, TypeVar

from rekindle import methods

Factory = Callable[..., Any]
F = TypeVar("F", bound=Factory)

# What changes weight matrices block by block: these change the output layer too unless targets say otherwise.
_MATRIX = ("FIRE", "RandomIsometry", "Gaussian", "Rescale", "FreshAtNorm", "SingularClip")


class Tuned(Protocol):
    """A setting, as far as an arm is concerned."""

    @property
    def coefficients(self) -> Mapping[str, Mapping[str, Any]]:
        """Options by the name of an arm."""
        ...


@dataclass(frozen=True)
class Arm:
    """A remedy as a study sees it.

    method: a class in `rekindle.methods` or a registered name; None does nothing. For "Compose" the option `methods`
        lists pairs of a method and its options, which are applied in this order.
    when: "boundary" (at the start of every task but the first); also within a task: "epoch" (at the start of every
        epoch but the first), "10 epochs", a number of steps, or "period" (the method's own). Methods that act at every
        step or through the loss ignore it.
    lr: multiplies the setting's learning rate. optimizer, optimizer_options: instead of the setting's own.
    raised: a factor and a share, as in [3, 0.5]: every task but the first begins with a rate so many times higher,
        which falls to its own over this share of the task (re-warming, arXiv 2507.20057); with a share of 0 it stays.
    tuning: what may be tried instead, as changes of this arm's fields; `options` there are added to its own.

    >>> Arm("gentle fire", "FIRE", {"strength": 0.5}).build().settings()
    {'recalibrate': False, 'strength': 0.5}
    """

    name: str
    method: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    when: str | int = "boundary"
    lr: float | None = None
    optimizer: str | None = None
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    raised: tuple[float, float] | None = None
    tuning: tuple[Mapping[str, Any], ...] = ()
    about: str = ""

    def __post_init__(self) -> None:
        steps = isinstance(self.when, int) and self.when > 0
        if self.when not in ("boundary", "period") and not self.epochs and not steps:
            raise ValueError(
                f'arm {self.name!r}: when={self.when!r} is neither "boundary", "epoch", "10 epochs", "period" nor a '
                "step count"
            )
        object.__setattr__(self, "tuning", tuple(self.tuning))
        if self.raised is not None:
            factor, share = self.raised
            if factor <= 0 or not 0 <= share <= 1:
                raise ValueError(f"arm {self.name!r}: raised={self.raised} must be a positive factor and a share")
            object.__setattr__(self, "raised", (float(factor), float(share)))

    @property
    def epochs(self) -> int:
        """After how many epochs the method is applied within a task; 0 if it goes by something else."""
        found = re.fullmatch(r"epoch|([1-9]\d*) epochs", str(self.when))
        return int(found[1] or 1) if found else 0

    def within(self, setting: Tuned) -> Arm:
        """The arm with the options that the setting has for it; the arm's own options win."""
        return replace(self, options={**setting.coefficients.get(self.name, {}), **self.options})

    def of_the_body(self) -> Arm:
        """The same with the output layer left as it is, named `NAME-body`.

        >>> ARMS["random-isometry"].of_the_body().options
        {'targets': 'auto'}
        """
        if self.method not in _MATRIX or "targets" in self.options:
            raise ValueError(f"arm {self.name!r} has no {self.name}-body: only matrix methods without targets have")
        return replace(self, name=f"{self.name}-body", options={**self.options, "targets": "auto"})

    def build(self) -> Any:
        """The method, new; None for an arm that does nothing."""
        if self.method is None:
            return None
        try:
            method = _built(self.method, self.options)
        except TypeError as error:
            raise ValueError(f"arm {self.name!r}: {self.method} does not take {dict(self.options)}: {error}") from error
        if self.when == "period" and getattr(method, "period", None) is None:
            raise ValueError(f'arm {self.name!r}: when="period", but {self.method} has no period')
        return method

    def makers(self) -> list[Factory]:
        """What makes the method, and those that it joins."""
        if self.method is None:
            return []
        joined = self.options.get("methods", ()) if self.method == "Compose" else ()
        return [factory(self.method), *(factory(name) for name, _ in joined)]

    def variants(self) -> list[Arm]:
        """The arm and what may be tried instead: the budget that tuning has, which is the same for every arm."""
        found = [self]
        for change in self.tuning:
            merged = {**change, "options": {**self.options, **change.get("options", {})}}
            found.append(replace(self, **merged))
        return found

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON holds them."""
        return {**asdict(self), "tuning": [dict(each) for each in self.tuning]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Arm:
        """An arm from what `to_dict` gave."""
        unknown = set(data) - {f.name for f in fields(cls)}
        if unknown:
            raise ValueError(f"an arm has no field {sorted(unknown)[0]!r}; it has {[f.name for f in fields(cls)]}")
        return cls(**data)


_own: dict[str, Factory] = {}  # what users register


def factory(name: str) -> Factory:
    """What makes the method of this name."""
    if name in _own:
        return _own[name]
    if name in methods.__all__ and inspect.isclass(getattr(methods, name)):
        found: Factory = getattr(methods, name)
        return found
    known = [each for each in (*methods.__all__, *_own) if each != "muon"]
    close = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
    raise ValueError(f"there is no method {name!r}; {hint}")


def _built(name: str, options: Mapping[str, Any]) -> object:
    if name != "Compose":
        return factory(name)(**options)
    rest = {key: value for key, value in options.items() if key != "methods"}
    return factory(name)([_built(inner, given) for inner, given in options.get("methods", ())], **rest)


def register(name: str, **fields: Any) -> Callable[[F], F]:
    """Add your own arm: a class or function whose call returns a method; fields are those of `Arm`.

    A method is anything that `rekindle.projection.method.Method` describes; `moment`, `remember` and `observe` are
    used where it has them.

    >>> from rekindle.methods.remedy import Remedy
    >>> from rekindle import Receipt
    >>> @register("zeroed", about="all weights become zero")
    ... class Zeroed(Remedy):
    ...     def __call__(self, model, optimizer=None, **_):
    ...         for parameter in model.parameters():
    ...             parameter.data.zero_()
    ...         return Receipt("zeroed")
    >>> arms("zeroed")[0].build()
    Zeroed()
    >>> del ARMS["zeroed"]  # registered for this example only
    """

    def keep(made: F) -> F:
        _own[name] = made
        ARMS[name] = Arm(name, name, **fields)
        return made

    return keep


def arms(names: str | Arm | Iterable[str | Arm]) -> list[Arm]:
    """The arms that these names mean, groups expanded, each once; NAME-body leaves the output layer as it is.

    >>> [arm.name for arm in arms(["nothing", "solvers"])]
    ['nothing', 'fire', 'fire-10', 'fire-5']
    """
    found: dict[str, Arm] = {}
    for name in [names] if isinstance(names, str | Arm) else names:
        if isinstance(name, Arm):
            found[name.name] = name
            continue
        inside = list(ARMS) if name == "all" else GROUPS.get(name, [name])
        for each in inside:
            if each not in ARMS and each.endswith("-body") and each.removesuffix("-body") in ARMS:
                found.setdefault(each, ARMS[each.removesuffix("-body")].of_the_body())
                continue
            if each not in ARMS:
                close = difflib.get_close_matches(each, [*ARMS, *GROUPS, "all"], 1)
                hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join((*ARMS, *GROUPS, 'all'))}"
                raise ValueError(f"there is no arm or group {each!r}; {hint}")
            found.setdefault(each, ARMS[each])
    return list(found.values())


def _options(name: str, *values: object) -> tuple[Mapping[str, Any], ...]:
    return tuple({"options": {name: value}} for value in values)


def _then_shrink(method: str, scale: str = "norm:0.1") -> Mapping[str, Any]:
    return {"methods": [[method, {}], ["Rescale", {"scale": scale}]]}


def _shrunk(name: str, method: str, about: str) -> Arm:
    """A method, then other norms; tuning has the same four norms as the isometries."""
    tuning = tuple({"options": _then_shrink(method, scale)} for scale in _NORMS)
    return Arm(name, "Compose", _then_shrink(method), tuning=tuning, about=about)


_HALF = {"lr": 0.5}
_STRONG = _options("coefficient", 1e-4, 1e-2)
_GAINS = (_HALF, *_options("gain", 0.7, 2.8))
_NORMS = ("norm:0.03", "norm:0.3", "norm")
_SHRINKS = _options("scale", *_NORMS)

ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm("nothing", tuning=(_HALF, {"lr": 0.25}, {"lr": 2.0}), about="train on"),
        Arm("full-reset", "FullReset", tuning=(_HALF, {"lr": 0.25}, {"lr": 2.0}), about="all weights drawn anew"),
        Arm("he-reset", "FullReset", {"start": "he"}, tuning=_GAINS, about="all drawn anew with He's variance"),
        Arm("orthogonal-reset", "FullReset", {"start": "orthogonal"}, tuning=_GAINS, about="all drawn as isometries"),
        Arm("shrink-perturb", "ShrinkPerturb", tuning=(_HALF, *_options("coefficient", 0.5, 0.95))),
        Arm("shrink-perturb-fresh", "ShrinkPerturb", {"noise": "fresh"}, tuning=_options("coefficient", 0.5, 0.95)),
        Arm("dash", "DASH", tuning=(_HALF, *_options("lam", 0.0, 0.3))),
        Arm("redo", "ReDo", when="epoch", tuning=(_HALF, *_options("tau", 0.0, 0.1))),
        Arm("regrama", "ReGraMa", when="epoch", tuning=(_HALF, *_options("tau", 0.0, 0.1))),
        Arm("continual-backprop", "ContinualBackprop", tuning=(_HALF, *_options("replacement_rate", 1e-5, 1e-3))),
        Arm("self-normalized-reset", "SelfNormalizedReset", tuning=(_HALF, *_options("percentile", 0.96, 0.92))),
        Arm("l2-init", "L2Init", tuning=(_HALF, *_STRONG)),
        Arm("parseval", "Parseval", tuning=(_HALF, *_STRONG)),
        Arm("spectral", "SpectralRegularizer", tuning=(_HALF, *_STRONG)),
        Arm("isometry-loss", "IsometryLoss", tuning=(_HALF, *_STRONG)),
        Arm(
            "adamo",
            "IsometryLoss",
            {"scale": 1.0, "per_dimension": False, "decoupled": True},
            tuning=(_HALF, *_options("coefficient", 1e-2, 1e-1)),
            about="isometry wanted beside Adam's step, not through it",
        ),
        Arm(
            "weight-decay",
            optimizer="adamw",
            optimizer_options={"weight_decay": 0.1},
            tuning=(_HALF, {"optimizer_options": {"weight_decay": 1.0}}, {"optimizer_options": {"weight_decay": 0.01}}),
        ),
        Arm("weight-clip", "WeightClip", tuning=(_HALF, *_options("kappa", 1.0, 3.0))),
        Arm("normalize-project", "NormalizeAndProject", tuning=(_HALF, {"lr": 0.25}, {"lr": 2.0})),
        Arm(
            "hyperball",
            "Hyperball",
            tuning=(_HALF, *_options("rate", 3e-3, 1e-2)),
            about="norms of weights and steps fixed",
        ),
        Arm("soft-rescaling", "SoftWeightRescaling", tuning=(_HALF, *_options("coefficient", 1e-4, 1e-2))),
        Arm("weight-reset", "SelectiveWeightReset", tuning=(_HALF, *_options("factor", 1e-3, 0.1))),
        Arm("upgd", "UPGD", tuning=(_HALF, {"lr": 0.25}, {"lr": 2.0})),
        Arm("hare-tortoise", "HareTortoise", when="10 epochs", tuning=(_HALF, *_options("momentum", 0.99, 0.9999))),
        Arm(
            "injection",
            "PlasticityInjection",
            tuning=(_HALF, {"lr": 0.25}, {"lr": 2.0}),
            about="of the output layer: a new optimizer state for it, no more",
        ),
        Arm("layer-norm-reset", "LayerNormReset", about="normalization layers start again"),
        Arm("muon", optimizer="muon", optimizer_options={"lr": 1e-2}, tuning=(_HALF, {"lr": 0.25}, {"lr": 2.0})),
        Arm("fire", "FIRE", tuning=(_HALF, *_options("scale", "nearest", "norm")), about="rekindle.fire as it is"),
        Arm(
            "fire-paper-cnn",
            "Compose",
            {"methods": [["FIRE", {"targets": "conv", "scale": "paper"}], ["LayerReset", {"kind": "Linear"}]]},
            about="the paper's DQN: convolutions projected, linear layers drawn anew",
        ),
        Arm(
            "shrink-reset",
            "Compose",
            {
                "methods": [
                    ["ShrinkPerturb", {"coefficient": 0.8, "noise": "fresh", "targets": "conv"}],
                    ["LayerReset", {"kind": "Linear"}],
                ]
            },
            about="the paper's SR: convolutions keep a fifth, linear layers are drawn anew",
        ),
        Arm("rate-raised", raised=(3.0, 0.0), about="a rate three times higher after the first task"),
        Arm("rate-rewarm", raised=(10.0, 0.5), about="a rate ten times higher that falls in the first half of a task"),
        Arm("optimizer-reset", "OptimizerReset", about="the weights stay, the optimizer starts again"),
        Arm("rescale", "Rescale", about="the old directions at FIRE's norm"),
        Arm("shrink", "Rescale", {"scale": "norm:0.1"}, tuning=_SHRINKS, about="old directions, a tenth of the norm"),
        Arm("fire-shrink", "FIRE", {"scale": "norm:0.1"}, tuning=_SHRINKS, about="FIRE at a tenth of the old norm"),
        Arm("random-isometry-shrink", "RandomIsometry", {"scale": "norm:0.1"}, tuning=_SHRINKS),
        _shrunk("full-reset-shrink", "FullReset", about="drawn anew, then a tenth of the norm"),
        _shrunk("dash-shrink", "DASH", about="DASH, then a tenth of the norm"),
        Arm(
            "effective-lr",
            "StartNorm",
            {"factor": 1.0},
            tuning=_options("factor", 0.03, 0.1, 0.3),
            about="scale-invariant weights at the norm of their start",
        ),
        Arm(
            "fire-effective-lr",
            "Compose",
            {"methods": [["FIRE", {}], ["StartNorm", {"factor": 1.0}]]},
            about="FIRE, then these norms",
        ),
        Arm(
            "start-norm",
            "StartNorm",
            tuning=_options("factor", 0.03, 0.3, 1.0),
            about="scale-invariant weights at a tenth of their first norm",
        ),
        Arm("random-isometry", "RandomIsometry", tuning=(_HALF, *_options("scale", "nearest", "norm"))),
        Arm("gaussian", "Gaussian", tuning=(_HALF, *_options("scale", "init:kaiming", "norm"))),
        Arm("random-isometry-nearest", "RandomIsometry", {"scale": "nearest"}),
        Arm("fresh-at-norm", "FreshAtNorm", about="new directions at the old norm"),
        Arm("head-reset", "HeadReset", about="only the output layer is drawn anew"),
        Arm("fire-10", "FIRE", {"solver": {"solver": "paper", "steps": 10}}, about="the released solver, 10 steps"),
        Arm("fire-5", "FIRE", {"solver": {"solver": "paper", "steps": 5}}, about="the released solver, 5 steps"),
        Arm(
            "fire-paper",
            "FIRE",
            {"scale": "paper", "targets": "auto"},
            tuning=(_HALF, *_options("scale", "paper:0.3", "paper:3")),
            about="the paper's scale, the output layer stays",
        ),
        Arm("fire-nearest", "FIRE", {"scale": "nearest"}),
        Arm("fire-norm", "FIRE", {"scale": "norm"}),
        Arm(
            "fire-init",
            "FIRE",
            {"scale": "init:kaiming"},
            tuning=(_HALF, *_options("scale", "init:kaiming(0.7)", "init:kaiming(2.8)")),
            about="FIRE at the norm of a He start",
        ),
        Arm("fire-qk", "FIRE", {"targets": "attention.qk"}),
        Arm("fire-attention", "FIRE", {"targets": "attention"}),
        Arm("fire-mlp", "FIRE", {"targets": "mlp"}),
        Arm("fire-all", "FIRE", {"targets": "all"}, about="embeddings too"),
        Arm("fire-state-fresh", "FIRE", {"optimizer_state": "fresh"}),
        Arm("fire-state-moments", "FIRE", {"optimizer_state": "moments"}),
        Arm("fire-state-step", "FIRE", {"optimizer_state": "step"}),
        Arm("fire-state-none", "FIRE", {"optimizer_state": "none"}),
    )
}

ARMS["fire-body"] = replace(ARMS["fire"].of_the_body(), about="the output layer stays")

GROUPS: dict[str, list[str]] = {
    "main": [
        *("nothing", "full-reset", "he-reset", "shrink-perturb", "dash", "redo", "l2-init", "fire"),
        "fire-paper",
    ],
    "controls": ["optimizer-reset", "rescale", "random-isometry", "fresh-at-norm", "head-reset"],
    "norms": ["nothing", "shrink", "full-reset-shrink", "fire-shrink", "random-isometry-shrink", "dash-shrink"],
    "solvers": ["fire", "fire-10", "fire-5"],
    "scales": ["fire", "fire-paper", "fire-init", "fire-nearest", "fire-norm"],
    "targets": ["fire", "fire-body", "fire-qk", "fire-attention", "fire-mlp", "fire-all"],
    "states": ["fire-state-fresh", "fire-state-moments", "fire-state-step", "fire-state-none"],
    "continuous": [
        "l2-init",
        "parseval",
        "spectral",
        "isometry-loss",
        "adamo",
        "weight-decay",
        "weight-clip",
        "normalize-project",
        "hyperball",
        "soft-rescaling",
        "weight-reset",
        "upgd",
        "continual-backprop",
        "self-normalized-reset",
        "muon",
    ],
}
