"""Remedies that act on the weights at every step: a term of the loss, or a decoupled step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from rekindle.blocks import names
from rekindle.engine.devices import full_precision
from rekindle.methods.caching import PerModel
from rekindle.methods.call import Call
from rekindle.methods.remedy import FromStart, Remedy
from rekindle.methods.selection import (
    Share,
    chosen_biases,
    chosen_norms,
    chosen_parameters,
    chosen_weights,
    matrices_of,
    trainable,
)
from rekindle.optimizers import StateReset
from rekindle.optimizers import resetting as optimizers
from rekindle.projection.receipt import BlockRecord, Receipt
from rekindle.projection.stores import LiveWeight
from rekindle.projection.targets import Targets
from rekindle.sharding.team import refuse_shards


class Regularizer(Remedy):
    """coefficient · penalty(model), as a term of the loss (`loss_term`) or decoupled (`__call__`).

    The decoupled form is what AdamW is to Adam: after the optimizer's step, θ ← θ − lr·∇(coefficient·penalty), with
    the learning rate of the group that holds θ. Adaptive optimizers divide the gradient of a loss term by its own
    size, which makes the two forms differ (Loshchilov & Hutter, 2019).
    """

    def __init__(self, coefficient: float, *, decoupled: bool = False, seed: int = 0) -> None:
        if coefficient < 0:
            raise ValueError(f"coefficient={coefficient} must not be negative")
        super().__init__(seed=seed)
        self.coefficient, self.decoupled = coefficient, decoupled
        self.moment = "step" if decoupled else "loss"
        self._named: PerModel[dict[str, Parameter]] = PerModel()

    def penalty(self, model: nn.Module) -> Tensor:
        """The penalty itself, a scalar with gradient."""
        raise NotImplementedError

    def loss_term(self, model: nn.Module) -> Tensor:
        """What to add to the training loss."""
        refuse_shards(model, type(self).__name__)
        with full_precision():
            return self.coefficient * self.penalty(model)

    def gradients(self, model: nn.Module, parameters: Sequence[Parameter]) -> tuple[Sequence[Tensor | None], float]:
        """Tensors and a factor: their product is the loss term's gradient for each of these parameters.

        None stands for a parameter on which it does not depend.
        """
        with torch.enable_grad():
            return torch.autograd.grad(self.loss_term(model), parameters, allow_unused=True), 1.0

    @torch.no_grad()
    def apply(self, call: Call) -> Receipt:
        """One decoupled step of the penalty."""
        rates = learning_rates(call.optimizer)
        every = self._named.get(call.model, lambda: dict(names.named_parameters(call.model)))
        named = {n: p for n, p in every.items() if id(p) in rates and p.requires_grad}
        if not named:
            raise ValueError(
                f"{type(self).__name__} takes its step size from the optimizer, and none of the given optimizer's "
                "parameters is in the model: pass the optimizer that trains it"
            )
        found, factor = self.gradients(call.model, list(named.values()))
        unmoved = {n: "the penalty does not depend on it" for n, g in zip(named, found, strict=True) if g is None}
        held = [n for n in named if n not in unmoved]
        gradients = [gradient for gradient in found if gradient is not None]
        lengths = torch.stack(torch._foreach_norm(gradients)).tolist() if gradients else []
        for name, gradient, length in zip(held, gradients, lengths, strict=True):
            if not math.isfinite(length) and not bool(torch.isfinite(gradient).all()):
                raise ValueError(f"the penalty's gradient for {name!r} is NaN or Inf; nothing was changed")
        steps = [factor * rates[id(named[name])] for name in held]
        parameters: list[Tensor] = [named[name] for name in held]
        new = torch._foreach_sub(parameters, torch._foreach_mul(gradients, steps)) if gradients else ()
        records = []
        for name, parameter, value, step, length in zip(held, parameters, new, steps, lengths, strict=True):
            if torch.equal(value, parameter):
                unmoved[name] = "its step is lost in rounding"
                continue
            parameter.copy_(value)
            records.append(BlockRecord(name, sfe=(step * length) ** 2, values={"moved": step * length}))
        return Receipt(self.name, tuple(records), unmoved, optimizer=StateReset("none"))


def learning_rates(optimizer: object) -> Mapping[int, float]:
    """The learning rate of every parameter that the optimizers hold, by id."""
    groups = [group for each in optimizers.unwrap(optimizer) for group in each.param_groups]
    return {id(parameter): float(group["lr"]) for group in groups for parameter in group["params"]}


class WeightDecay(Regularizer):
    """(coefficient/2)·‖θ‖² (Krogh & Hertz, 1991); decoupled it is AdamW's θ ← (1 − lr·coefficient)·θ.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    >>> _ = nn.init.ones_(model.weight)
    >>> _ = WeightDecay(0.1)(model, sgd)
    >>> round(model.weight.item(), 4)
    0.95

    Args:
        coefficient: weight of the penalty.
        decoupled: subtract the gradient after the optimizer's step, times its learning rate, in place of a loss term.
        targets: which weights, as in `rekindle.fire`.
        seed: of the method's own random numbers.
    """

    name = "weight-decay"

    def __init__(
        self, coefficient: float = 1e-2, *, decoupled: bool = True, targets: Targets = "trainable", seed: int = 0
    ) -> None:
        super().__init__(coefficient, decoupled=decoupled, seed=seed)
        self.targets = targets
        self._chosen: PerModel[list[Share]] = PerModel()

    def penalty(self, model: nn.Module) -> Tensor:
        """½‖θ‖² over the targets."""
        chosen = self._chosen.get(model, lambda: list(trainable(chosen_parameters(model, self.targets)[0]).values()))
        return 0.5 * torch.stack([share.of(share.parameter).square().sum() for share in chosen]).sum()


class L2Init(Regularizer, FromStart):
    """Regenerative regularization (Kumar, Marklund & Van Roy, 2023): coefficient·‖θ − θ₀‖².

    θ₀ is the stored start: `remember(model)` while the model is new, or `initial=`.

    >>> model = nn.Linear(2, 2)
    >>> method = L2Init(0.1)
    >>> method.remember(model)
    >>> method.loss_term(model).item()
    0.0

    Args:
        coefficient: weight of the penalty.
        decoupled: subtract the gradient after the optimizer's step, times its learning rate, in place of a loss term.
        targets: which weights, as in `rekindle.fire`.
        initial: the stored start, from `rekindle.initial.snapshot(model)`.
        seed: of the method's own random numbers.
    """

    name = "l2-init"

    def __init__(
        self,
        coefficient: float = 1e-3,
        *,
        decoupled: bool = False,
        targets: Targets = "trainable",
        initial: Mapping[str, Tensor] | None = None,
        seed: int = 0,
    ) -> None:
        Regularizer.__init__(self, coefficient, decoupled=decoupled, seed=seed)
        self._initial = dict(initial) if initial is not None else None
        self._fresh = None
        self.targets = targets
        self._pairs: PerModel[list[tuple[Share, Tensor]]] = PerModel()
        self._matched: tuple[Any, ...] = ((), [], [])  # the parameters asked for, with those that have a start

    def remember(self, model: nn.Module) -> None:
        """Store the model's present parameters as θ₀."""
        super().remember(model)
        self._pairs.clear()
        self._matched = (), [], []

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back the stored θ₀."""
        super().restore(state)
        self._pairs.clear()
        self._matched = (), [], []

    def penalty(self, model: nn.Module) -> Tensor:
        """‖θ − θ₀‖² over the targets."""

        pairs = self._pairs.get(model, lambda: self._paired(model))
        return torch.stack([(share.of(share.parameter) - start).square().sum() for share, start in pairs]).sum()

    def gradients(self, model: nn.Module, parameters: Sequence[Parameter]) -> tuple[Sequence[Tensor | None], float]:
        """θ − θ₀ and 2·coefficient, without a graph: a third of the time on small networks."""
        pairs = self._pairs.get(model, lambda: self._paired(model))
        asked = (id(pairs), *map(id, parameters))
        if self._matched[0] != asked:
            if any(share.mask is not None for share, _ in pairs):
                return super().gradients(model, parameters)
            start = {id(share.parameter): value for share, value in pairs}
            held = [parameter for parameter in parameters if id(parameter) in start]
            self._matched = asked, held, [start[id(parameter)] for parameter in held]
        _, held, starts = self._matched
        with torch.no_grad():
            moved: Sequence[Tensor] = torch._foreach_sub(held, starts) if held else ()
        if len(held) == len(parameters):
            return moved, 2 * self.coefficient
        by_parameter = dict(zip(map(id, held), moved, strict=True))
        return [by_parameter.get(id(parameter)) for parameter in parameters], 2 * self.coefficient

    def _paired(self, model: nn.Module) -> list[tuple[Share, Tensor]]:
        refuse_shards(model, type(self).__name__)
        now = trainable(chosen_parameters(model, self.targets)[0])
        start = self.stored(model, now)
        return [(share, share.of(start[name])) for name, share in now.items()]


class Parseval(Regularizer):
    """coefficient·Σ‖WWᵀ − scale·I‖²_F (Cissé et al., 2017; for plasticity Chung et al., 2024).

    A convolution is flattened to (out, in·kh·kw). The identity has the size of the rows, as published, which a
    matrix with out > in cannot reach; `side="smaller"` uses the smaller Gram matrix instead. The output head is not
    among the targets. Chung et al. set `scale` to the square of the gain of their orthogonal start (2 for ReLU) and
    the coefficient in proportion to 1/width². FIRE's form of it has `targets="layers"`, head included, and
    `norms=True`: Σ(γ² − scale)² of the weight γ of each normalization layer among the targets is added.

    >>> model = nn.Sequential(nn.Linear(4, 2, bias=False), nn.ReLU(), nn.Linear(2, 1))
    >>> _ = nn.init.orthogonal_(model[0].weight)
    >>> Parseval(1.0).loss_term(model).item() < 1e-10
    True

    Args:
        coefficient: weight of the penalty.
        scale: what the Gram matrix is compared with, times the identity.
        side: "rows" as published, or "smaller" for the smaller Gram matrix.
        norms: also pull the squared weights of normalization layers to `scale`.
        decoupled: subtract the gradient after the optimizer's step, times its learning rate, in place of a loss term.
        targets: which weights, as in `rekindle.fire`.
        seed: of the method's own random numbers.
    """

    name = "parseval"

    def __init__(
        self,
        coefficient: float = 1e-3,
        scale: float = 1.0,
        *,
        side: str = "rows",
        norms: bool = False,
        decoupled: bool = False,
        targets: Targets = "auto",
        seed: int = 0,
    ) -> None:
        if side not in ("rows", "smaller"):
            raise ValueError(f"side={side!r} is neither 'rows' nor 'smaller'")
        super().__init__(coefficient, decoupled=decoupled, seed=seed)
        self.scale, self.side, self.norms, self.targets = scale, side, norms, targets
        self._chosen: PerModel[tuple[list[LiveWeight], list[Parameter]]] = PerModel()

    def penalty(self, model: nn.Module) -> Tensor:
        """The sum over all targeted matrices."""
        chosen, scales = self._chosen.get(model, lambda: self._choose(model))
        terms = []
        for block, w in (pair for each in chosen for pair in matrices_of(each)):
            rows = w.mT if self.side == "smaller" and block.out > block.in_ else w
            eye = torch.eye(rows.shape[-2], dtype=rows.dtype, device=rows.device)
            terms.append((rows @ rows.mT - self.scale * eye).square().sum())
        terms += [(gamma.square() - self.scale).square().sum() for gamma in scales]
        return torch.stack(terms).sum()

    def _choose(self, model: nn.Module) -> tuple[list[LiveWeight], list[Parameter]]:
        weights = chosen_weights(model, self.targets, conv="flat")[0]
        return weights, norm_scales(model, self.targets) if self.norms else []


class SpectralRegularizer(Regularizer):
    """coefficient·[Σ(σ_max(W)^k − 1)² + Σ(max|γ|^k − 1)² + Σ‖b‖^2k] (Lewandowski et al., 2024).

    What multiplies is pulled to one, what adds to zero: weights by their largest singular value (a convolution
    flattened to (out, in·kh·kw)), scales γ of normalization layers, biases b. σ_max comes from `iterations` steps of
    a power iteration whose vectors are kept from call to call, as in spectral normalization; k = 2 in the paper.
    `targets="layers"` is the paper's: all of them. Other targets take the biases of the chosen weights, and the
    normalization layers that they name.

    >>> model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU(), nn.Linear(3, 1, bias=False))
    >>> _ = nn.init.eye_(model[0].weight), nn.init.constant_(model[2].weight, 3**-0.5)
    >>> SpectralRegularizer(1.0).loss_term(model).item() < 1e-6
    True

    Args:
        coefficient: weight of the penalty.
        k: the exponent of the paper.
        iterations: power iterations per call.
        decoupled: subtract the gradient after the optimizer's step, times its learning rate, in place of a loss term.
        targets: which weights, as in `rekindle.fire`.
        seed: of the method's own random numbers.
    """

    name = "spectral-regularizer"

    def __init__(
        self,
        coefficient: float = 1e-3,
        k: int = 2,
        *,
        iterations: int = 1,
        decoupled: bool = False,
        targets: Targets = "layers",
        seed: int = 0,
    ) -> None:
        if k < 1 or iterations < 1:
            raise ValueError(f"k={k} and iterations={iterations} must be at least 1")
        super().__init__(coefficient, decoupled=decoupled, seed=seed)
        self.k, self.iterations, self.targets = k, iterations, targets
        self._chosen: PerModel[tuple[list[LiveWeight], list[Parameter], list[Share]]] = PerModel()
        self._vectors: dict[str, Tensor] = {}

    def penalty(self, model: nn.Module) -> Tensor:
        """The sum over weights, scales and biases."""
        chosen, scales, biases = self._chosen.get(model, lambda: self._choose(model), lambda _: self._vectors.clear())
        terms = [share.of(share.parameter).square().sum() ** self.k for share in biases]
        terms += [(scale.abs().amax() ** self.k - 1).square() for scale in scales]
        for each in chosen:
            for number, (_, w) in enumerate(matrices_of(each)):
                terms.append((self._largest(f"{each.name}:{number}", w) ** self.k - 1).square().sum())
        return torch.stack(terms).sum()

    def _choose(self, model: nn.Module) -> tuple[list[LiveWeight], list[Parameter], list[Share]]:
        weights = chosen_weights(model, self.targets, conv="flat")[0]
        if self.targets == "layers":
            named = [(name, p) for name, p in names.named_parameters(model) if p.requires_grad]
            biases = {name: Share(name, p) for name, p in named if "bias" in name.rpartition(".")[2]}
        else:
            biases = chosen_biases(model, weights)
            norms = chosen_norms(model, self.targets)
            offsets = {name: norm._parameters.get("bias") for name, norm in norms.items()}
            biases |= {f"{n}.bias": Share(f"{n}.bias", b) for n, b in offsets.items() if b is not None}
        return weights, norm_scales(model, self.targets), list(biases.values())

    def _largest(self, name: str, w: Tensor) -> Tensor:
        """σ_max of each matrix (count, out, in): uᵀWv with vectors that get no gradient."""
        with torch.no_grad():
            v = self._vectors.get(name)
            steps = self.iterations
            if v is None or v.shape != (w.shape[0], w.shape[2], 1):
                v = torch.randn(w.shape[0], w.shape[2], 1, generator=self._own)
                steps = max(steps, 15)  # the vectors start anywhere
            v = v.to(w)
            for _ in range(steps):
                u = nn.functional.normalize(w @ v, dim=1)
                v = nn.functional.normalize(w.mT @ u, dim=1)
            self._vectors[name] = v
        return (u.mT @ w @ v).flatten()

    def gathered(self) -> dict[str, Any]:
        """The vectors of the power iteration."""
        return {"vectors": dict(self._vectors)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take them back."""
        self._vectors = dict(state["vectors"])


def norm_scales(model: nn.Module, targets: Targets) -> list[Parameter]:
    """The trainable weights γ of the normalization layers among the targets."""
    found = [norm._parameters.get("weight") for norm in chosen_norms(model, targets).values()]
    return [weight for weight in found if weight is not None and weight.requires_grad]
