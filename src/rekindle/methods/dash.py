"""DASH: shrink each filter unless it points along the negative gradient."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from rekindle.isolation import isolated
from rekindle.methods.call import Call
from rekindle.methods.remedy import Remedy
from rekindle.methods.selection import Share, chosen_biases, mask_of, plain_weights
from rekindle.methods.writing import overwrite
from rekindle.projection.method import Loss
from rekindle.projection.receipt import Receipt
from rekindle.projection.stores import LiveWeight
from rekindle.projection.targets import Targets


class DASH(Remedy):
    """Direction-aware shrinking (Shin, Oh, Cho & Yun, 2024).

    Over the batches, G ← (1 − alpha)·G + alpha·(−∇L) for every weight. Each row of a linear layer, each (output,
    input) kernel of a convolution, and the whole bias of a layer is then multiplied by max(cos(w, g), lam): what
    points along the negative gradient is kept, the rest shrinks to lam. (A bias that stayed as it was would
    outweigh its shrunken row: a layer without normalization dies of it.) A 1×1 kernel is one number, so its cosine is
    ±1. The defaults are FIRE's for ResNet-18. The authors take one batch per chunk of all data so far, oldest first,
    with BatchNorm in evaluation mode, and keep SGD's momentum (`optimizer_state="none"`); small batches give noisy
    directions, and then more falls to the floor.

    >>> model = nn.Linear(4, 3)
    >>> batches = [torch.randn(8, 4, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    >>> receipt = DASH(targets="weight")(model, batches=batches, loss=lambda m, x: m(x).square().mean())
    >>> receipt.totals()["counts"]
    {'units': 4, 'at the floor': 4}

    Args:
        alpha: weight of a new batch in the average of the negative gradients.
        lam: the least factor that a row, kernel or bias is multiplied by.
        targets: which parameters, as for `rekindle.plan`.
        optimizer_state: what becomes of the state of changed parameters: "fresh", "moments", "step" or "none".
        seed: what its own random numbers start from, when the call gives no generator.
    """

    name = "dash"
    batches = "all"

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

    def check(self, call: Call) -> None:
        """Both are needed."""
        if call.batches is None or call.loss is None:
            raise ValueError("DASH needs batches= and loss=: it shrinks by the direction of the loss's gradient")

    def apply(self, call: Call) -> Receipt:
        """Average the negative gradient over the batches, then shrink."""
        self.check(call)
        assert call.batches is not None and call.loss is not None
        picked, skipped = plain_weights(call.model, self.targets)
        held = {c.name: c.parameters()[c.name] for c in picked}
        weights = {c.name: Share(c.name, held[c.name], None if c.whole else mask_of(c)) for c in picked}
        biases = chosen_biases(call.model, picked)
        wanted = self._direction(call, call.loss, {**weights, **biases})
        factors = {c.name: unit_cosine(c, weights[c.name].parameter.detach(), wanted[c.name]) for c in picked}
        for name, bias in biases.items():
            factors[name] = cosine_similarity(bias.of(bias.parameter.detach()), bias.of(wanted[name]), dim=0)[None]
        new, counts = {}, {}
        for name, share in {**weights, **biases}.items():
            factor = factors[name].clamp_min(self.lam)
            new[name] = share.merged(share.parameter.detach() * factor)
            units = factor if name in biases else _chosen_units(share, factor)
            counts[name] = {"units": units.numel(), "at the floor": int((units <= self.lam).sum())}
        return overwrite(self.name, call, new, policy=self.optimizer_state, counts=counts, skipped=skipped)

    def _direction(self, call: Call, loss: Loss, shares: dict[str, Share]) -> dict[str, Tensor]:
        parameters = [share.parameter for share in shares.values()]
        average = [torch.zeros_like(parameter) for parameter in parameters]
        seen = 0
        with isolated(call.inner, training=call.inner.training), torch.enable_grad():
            for batch in call.batches or ():
                gradients = torch.autograd.grad(loss(call.inner, batch), parameters, allow_unused=True)
                for mean, gradient in zip(average, gradients, strict=True):
                    mean.mul_(1 - self.alpha)
                    if gradient is not None:
                        mean.sub_(gradient, alpha=self.alpha)
                seen += 1
        if not seen:
            raise ValueError("batches= holds no batch: DASH has no gradient to look at")
        return dict(zip(shares, call.mean(average), strict=True))


def unit_cosine(chosen: LiveWeight, weight: Tensor, direction: Tensor) -> Tensor:
    """cos(w, g) of each kernel or row, in a shape that multiplies the weight."""
    if isinstance(chosen.owner, nn.modules.conv._ConvNd):
        cosine = cosine_similarity(weight.flatten(2), direction.flatten(2), dim=-1)
        return cosine.reshape(*weight.shape[:2], *(1 for _ in weight.shape[2:]))
    transposed = chosen.blocks[0].layout.in_[0] < chosen.blocks[0].layout.out[0]
    inputs = -2 if transposed else -1
    return cosine_similarity(weight, direction, dim=inputs).unsqueeze(inputs)


def _chosen_units(share: Share, factor: Tensor) -> Tensor:
    """The factors of those units that lie in the chosen part."""
    if share.mask is None:
        return factor
    reduced = [d for d, (whole, unit) in enumerate(zip(share.mask.shape, factor.shape, strict=True)) if whole != unit]
    inside = share.mask
    for dim in reduced:
        inside = inside.any(dim, keepdim=True)
    return factor[inside]
