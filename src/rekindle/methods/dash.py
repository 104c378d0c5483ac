"""DASH: shrink each filter as far as the loss does not want it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from rekindle.blocks.names import named_parameters
from rekindle.isolation import isolated
from rekindle.methods.matrices import Chosen, plain_weights
from rekindle.methods.parameters import overwrite
from rekindle.methods.remedy import Remedy
from rekindle.projection.receipt import Batch, Loss, Meter, Receipt
from rekindle.projection.targets import Targets


class DASH(Remedy):
    """Direction-aware shrinking (Shin, Oh, Cho & Yun, 2024).

    Over the batches, G ← (1 − alpha)·G + alpha·(−∇L) for every weight. Each row of a linear layer, each (output,
    input) kernel of a convolution, and the whole bias of a layer is then multiplied by max(cos(w, g), lam): what
    points where the loss wants to go is kept, the rest shrinks to lam. (A bias that stayed as it was would drown
    its shrunken row: a layer without normalisation dies of it.) A 1×1 kernel is one number, so its cosine is ±1.
    The defaults are FIRE's for ResNet-18. The authors take one batch a chunk of all data so far, oldest first, with
    BatchNorm in evaluation mode, and keep SGD's momentum (`optimizer_state="none"`); small batches give noisy
    directions, and then more falls to the floor.

    >>> model = nn.Linear(4, 3)
    >>> batches = [torch.randn(8, 4, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    >>> receipt = DASH(targets="weight")(model, batches=batches, loss=lambda m, x: m(x).square().mean())
    >>> receipt.totals()["counts"]
    {'units': 4, 'at the floor': 4}
    """

    name = "dash"

    def __init__(
        self,
        alpha: float = 0.3,
        lam: float = 0.05,
        *,
        targets: Targets = "layers",
        optimizer_state: str = "fresh",
        seed: int = 0,
    ) -> None:
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha={alpha} must be above 0 and at most 1")
        if not 0 <= lam <= 1:
            raise ValueError(f"lam={lam} must lie between 0 and 1")
        super().__init__(seed=seed)
        self.alpha, self.lam = alpha, lam
        self.targets = targets
        self.optimizer_state = optimizer_state

    def __call__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        batches: Iterable[Batch] | None = None,
        loss: Loss | None = None,
        generator: torch.Generator | None = None,
    ) -> Receipt:
        """Average the negative gradient over `batches`, then shrink."""
        meter = Meter()
        if batches is None or loss is None:
            raise ValueError("DASH needs batches= and loss=: it shrinks by the direction of the loss's gradient")
        picked, skipped = plain_weights(model, self.targets)
        weights = {c.found.name: c.weight.parameters(c.found.name)[c.found.name] for c in picked}
        biases = biases_of(model, picked)
        wanted = self._direction(model, weights | biases, batches, loss)
        shares = {c.found.name: unit_cosine(c, weights[c.found.name].detach(), wanted[c.found.name]) for c in picked}
        shares |= {name: cosine_similarity(bias.detach(), wanted[name], dim=0)[None] for name, bias in biases.items()}
        new, counts = {}, {}
        for name, weight in (weights | biases).items():
            share = shares[name].clamp_min(self.lam)
            new[name] = weight.detach() * share
            counts[name] = {"units": share.numel(), "at the floor": int((share <= self.lam).sum())}
        return overwrite(
            self.name,
            model,
            new,
            optimizer,
            policy=self.optimizer_state,
            settings=self.settings(),
            counts=counts,
            skipped=skipped,
            meter=meter,
        )

    def _direction(
        self, model: nn.Module, weights: dict[str, nn.Parameter], batches: Iterable[Batch], loss: Loss
    ) -> dict[str, Tensor]:
        average = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        seen = 0
        with isolated(model, training=model.training), torch.enable_grad():
            for batch in batches:
                value = loss(model, batch)
                gradients = torch.autograd.grad(value, list(weights.values()), allow_unused=True)
                for mean, gradient in zip(average.values(), gradients, strict=True):
                    mean.mul_(1 - self.alpha)
                    if gradient is not None:
                        mean.sub_(gradient, alpha=self.alpha)
                seen += 1
        if not seen:
            raise ValueError("batches= holds no batch: DASH has no gradient to look at")
        return average


def biases_of(model: nn.Module, picked: Iterable[Chosen]) -> dict[str, nn.Parameter]:
    """The trainable biases that stand beside the picked weights, by name: in_proj_bias beside in_proj_weight."""
    parameters = dict(named_parameters(model))
    found = {}
    for each in picked:
        owner, _, tensor = each.found.name.rpartition(".")
        name = f"{owner}.{tensor.replace('weight', 'bias')}".lstrip(".")
        if name != each.found.name and name in parameters and parameters[name].requires_grad:
            found[name] = parameters[name]
    return found


def unit_cosine(chosen: Chosen, weight: Tensor, direction: Tensor) -> Tensor:
    """cos(w, g) of each kernel or row, in a shape that multiplies the weight."""
    if isinstance(chosen.weight.owner, nn.modules.conv._ConvNd):
        cosine = cosine_similarity(weight.flatten(2), direction.flatten(2), dim=-1)
        return cosine.reshape(*weight.shape[:2], *(1 for _ in weight.shape[2:]))
    transposed = chosen.blocks[0].layout.in_[0] < chosen.blocks[0].layout.out[0]
    inputs = -2 if transposed else -1
    return cosine_similarity(weight, direction, dim=inputs).unsqueeze(inputs)
