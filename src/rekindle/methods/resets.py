"""Resets of whole layers: everything, the head, chosen layers, the normalization layers, or the optimizer alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import ClassVar, Literal, TypedDict, Unpack, get_args

import torch
from torch import Tensor, nn

from rekindle.blocks import names
from rekindle.blocks.finding import Conv, find
from rekindle.initial import orthogonal_, tensors_of
from rekindle.methods.call import Call
from rekindle.methods.remedy import FromStart, Remedy
from rekindle.methods.selection import chosen_biases, chosen_parameters, chosen_weights, norm_layers
from rekindle.methods.writing import overwrite
from rekindle.optimizers import resetting as optimizers
from rekindle.projection.receipt import Receipt
from rekindle.projection.targets import Targets

Start = Literal["fresh", "init", "he", "orthogonal"]


class ResetOptions(TypedDict, total=False):
    """What every reset takes: which start, where it comes from, the optimizer's state afterwards, and the seed."""

    start: Start
    gain: float
    initial: Mapping[str, Tensor] | None
    fresh: Callable[[], nn.Module] | None
    optimizer_state: str
    seed: int


class FullReset(FromStart):
    """Every parameter and buffer back to a start: the strongest baseline for plasticity, and it keeps nothing.

    `start="fresh"` draws by the model's own scheme, `start="init"` goes to the stored start. torch's own scheme shrinks
    the signal at every ReLU layer; two other starts keep its size: `start="he"` draws the matrices of layers from
    N(0, gain²/fan_in) (He et al., 2015), `start="orthogonal"` as isometries times `gain`, a convolution with its taps
    side by side (Saxe et al., 2014). The output layer is drawn like the others and biases become zero; what is no
    matrix of a layer (norms, embeddings, adapters, parametrized weights) starts by its own scheme. The default gain is
    that of a ReLU.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    >>> _ = model(torch.randn(8, 2))
    >>> receipt = FullReset()(model)
    >>> len(receipt.changed), model[1].running_mean.tolist()
    (4, [0.0, 0.0, 0.0])

    Args:
        start: "fresh", "init", "he" or "orthogonal", see above.
        gain: of the starts "he" and "orthogonal"; √2 is that of a ReLU.
        initial: stored first weights by name, instead of those that `remember` saw.
        fresh: a function that returns a new model, where modules' own schemes are not how the model starts.
        optimizer_state: what becomes of the state of changed parameters: "fresh", "moments", "step" or "none".
        seed: what its own random numbers start from, when the call gives no generator.
    """

    name = "full-reset"

    def __init__(
        self,
        start: Start = "fresh",
        *,
        gain: float = math.sqrt(2.0),
        initial: Mapping[str, Tensor] | None = None,
        fresh: Callable[[], nn.Module] | None = None,
        optimizer_state: str = "fresh",
        seed: int = 0,
    ) -> None:
        if start not in get_args(Start):
            raise ValueError(f"start={start!r} is none of {', '.join(get_args(Start))}")
        if not 0 < gain < math.inf:
            raise ValueError(f"gain={gain} must be positive and finite")
        super().__init__(initial=initial, fresh=fresh, seed=seed)
        self.start, self.gain, self.optimizer_state = start, gain, optimizer_state

    def chosen(self, model: nn.Module) -> list[str]:
        """The clean names of all tensors to reset, buffers included."""
        return list(tensors_of(model))

    def apply(self, call: Call) -> Receipt:
        """Write the start into the chosen tensors."""
        names = self.chosen(call.model)
        if self.start == "init":
            values = self.stored(call.model, names)
        elif self.start == "fresh":
            values = self.drawn(call, names)
        else:
            values = self._scaled(call, names)
        return overwrite(self.name, call, values, policy=self.optimizer_state)

    def _scaled(self, call: Call, names: Collection[str]) -> dict[str, Tensor]:
        """Matrices of layers with variance gain²/fan_in or as isometries, their biases zero, the rest as it starts."""
        conv: Conv = "taps" if self.start == "he" else "flat"
        chosen = chosen_weights(call.model, "all", conv=conv)[0]
        weights = [w for w in chosen if w.name in names and not w.computed and w.entry.role != "embedding"]
        replaced = {w.name for w in weights if w.whole}
        values = self.drawn(call, [name for name in names if name not in replaced])
        for weight in weights:
            value = values.setdefault(weight.name, torch.empty_like(weight.read()))
            for block in weight.blocks:
                shape, generator = (block.count, block.out, block.in_), call.generator
                if self.start == "he":
                    matrices = torch.randn(shape, generator=generator, device=generator.device)
                    matrices *= self.gain / math.sqrt(block.fans[1] * block.taps)
                else:
                    matrices = orthogonal_(torch.empty(shape), gain=self.gain, generator=generator)
                block.write(value, matrices.to(value))
        for name, share in chosen_biases(call.model, weights).items():
            if name in names:
                values[name] = share.merged(torch.zeros_like(values[name]), values[name])
        return {name: values[name] for name in names}


class LayerReset(FullReset):
    """The parameters and buffers of chosen layers back to a start (Nikishin et al., 2022, reset the last ones).

    `layers` are globs of module names; `last` instead counts layers with weight matrices from the end, and takes
    whatever is registered after the first of them too, such as normalization; `kind` names the class of the layers,
    such as "Linear".

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> LayerReset(last=2)(model).changed
    ('2.weight', '2.bias', '4.weight', '4.bias')

    Args:
        layers: names or globs of modules.
        last: how many layers with weights, counted from the output.
        kind: the class of the layers, such as "Linear".
        options: start, gain, initial, fresh, optimizer_state and seed, as for `FullReset`.
    """

    name = "layer-reset"

    def __init__(
        self,
        layers: Sequence[str] | str = (),
        *,
        last: int | None = None,
        kind: str | None = None,
        **options: Unpack[ResetOptions],
    ) -> None:
        super().__init__(**options)
        if bool(layers) + (last is not None) + (kind is not None) != 1:
            raise ValueError(
                "give either layers=, globs of module names, or last=, a number from the end, or kind=, a class"
            )
        self.kind = kind
        if last is not None and last < 1:
            raise ValueError(f"last={last} must be at least 1: it counts layers from the end")
        self.layers, self.last = (layers,) if isinstance(layers, str) else tuple(layers), last

    def chosen(self, model: nn.Module) -> list[str]:
        """The tensors of the chosen layers."""
        if self.kind is not None:
            of = {name for name, module in names.named_modules(model) if type(module).__name__ == self.kind}
            return self.inside(model, lambda module: module in of)
        if self.last is not None:
            owners = list(dict.fromkeys(f.module for f in find(model) if f.blocks))
            modules = [name for name, _ in names.named_modules(model)]
            after = set(modules[modules.index(owners[-self.last :][0]) :])
            return self.inside(model, lambda module: module in after)
        return self.inside(model, lambda module: any(fnmatchcase(module, glob) for glob in self.layers))

    def inside(self, model: nn.Module, matches: Callable[[str], bool]) -> list[str]:
        """The tensors at or below modules whose name matches."""
        found = []
        for name in super().chosen(model):
            parts = name.split(".")[:-1]
            if any(matches(".".join(parts[:depth])) for depth in range(len(parts) + 1)):
                found.append(name)
        if not found:
            modules = ", ".join(name for name, _ in names.named_modules(model) if name)
            raise ValueError(f"{type(self).__name__} matches no module; there are: {modules}")
        return found


class HeadReset(LayerReset):
    """The output layer back to a start, found as in `rekindle.plan` or named by `heads`.

    >>> HeadReset()(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))).changed
    ('2.weight', '2.bias')

    Args:
        heads: names of the output layers, where they are not those that the plan would take.
        options: start, gain, initial, fresh, optimizer_state and seed, as for `FullReset`.
    """

    name = "head-reset"

    def __init__(self, heads: Sequence[str] | str | None = None, **options: Unpack[ResetOptions]) -> None:
        super().__init__("*", **options)
        self.heads = heads

    def chosen(self, model: nn.Module) -> list[str]:
        """The tensors of the modules that hold a head."""
        found = [f for f in find(model, heads=self.heads) if "head" in f.marks]
        if not found:
            raise ValueError("no output layer was found: name it with heads=")
        tied = [f.name for f in found if f.also]
        if tied:
            raise ValueError(f"the head is tied to {tied[0]!r}: resetting it would reset the embedding too")
        modules = {f.module for f in found}
        return self.inside(model, lambda module: module in modules)


class LayerNormReset(LayerReset):
    """Normalization layers back to weight 1, bias 0 and empty statistics; all other weights stay.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    >>> _ = nn.init.constant_(model[1].weight, 5.0)
    >>> _ = LayerNormReset()(model)
    >>> model[1].weight.tolist()
    [1.0, 1.0, 1.0]

    Args:
        optimizer_state: what becomes of the state of changed parameters: "fresh", "moments", "step" or "none".
        seed: what its own random numbers start from, when the call gives no generator.
    """

    name = "layer-norm-reset"

    def __init__(self, *, optimizer_state: str = "fresh", seed: int = 0) -> None:
        super().__init__("*", optimizer_state=optimizer_state, seed=seed)

    def chosen(self, model: nn.Module) -> list[str]:
        """The tensors of normalization layers, known by class or by a class name that ends in Norm."""
        norms = norm_layers(model)
        if not norms:
            raise ValueError("the model has no normalization layer")
        return self.inside(model, lambda module: module in norms)

    def drawn(self, call: Call, names: Collection[str]) -> dict[str, Tensor]:
        """Ones, zeros and empty statistics: every normalization layer starts so."""
        tensors = tensors_of(call.model)
        ones = ("weight", "running_var")
        return {name: torch.full_like(tensors[name], 1 if name.split(".")[-1] in ones else 0) for name in names}


class OptimizerReset(Remedy):
    """All weights stay, all optimizer state of the targets is dropped, as if the optimizer were new.

    The control for every remedy that comes with a new optimizer: what a remedy gains beyond this is its own. An
    optimizer counts steps per parameter, so the whole state of a fused weight is dropped.

    >>> model = nn.Linear(2, 1)
    >>> adam = torch.optim.Adam(model.parameters())
    >>> model(torch.ones(1, 2)).sum().backward(); adam.step()
    >>> OptimizerReset()(model, adam).optimizer.parameters, adam.state[model.weight]["exp_avg"].abs().max().item()
    (2, 0.0)

    Args:
        targets: which parameters, as for `rekindle.plan`.
        seed: what its own random numbers start from, when the call gives no generator.
    """

    name = "optimizer-reset"
    sharded = True
    policy: ClassVar[str] = "fresh"

    def __init__(self, *, targets: Targets = "trainable", seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.targets = targets

    def apply(self, call: Call) -> Receipt:
        """Reset the state that `policy` names."""
        if call.optimizer is None:
            raise ValueError(f"{type(self).__name__} changes the optimizer and nothing else: pass the optimizer")
        chosen, _ = chosen_parameters(call.model, self.targets)
        parameters = {name: share.parameter for name, share in chosen.items()}
        return Receipt(self.name, optimizer=optimizers.reset(call.optimizer, parameters, policy=self.policy))


class AdamRel(OptimizerReset):
    """Adam with relative timesteps (Ellis et al., 2024): the step count becomes 0, moments and weights stay.

    When the objective changes, gradients jump; bias correction by a small step count then bounds the update, which
    an old count would let grow far beyond the learning rate. No weight is touched.

    >>> model = nn.Linear(2, 1)
    >>> adam = torch.optim.Adam(model.parameters())
    >>> model(torch.ones(1, 2)).sum().backward(); adam.step()
    >>> AdamRel()(model, adam).optimizer.reset, adam.state[model.weight]["step"].item()
    (2, 0.0)

    Args:
        targets: which parameters, as for `rekindle.plan`.
        seed: what its own random numbers start from, when the call gives no generator.
    """

    name = "adam-rel"
    policy = "step"
