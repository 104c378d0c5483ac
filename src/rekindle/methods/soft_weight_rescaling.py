"""Soft weight rescaling: every layer is pulled towards its first norm, and biases along with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rekindle.blocks import names
from rekindle.methods.call import Call
from rekindle.methods.normalize_and_project import KeptNorms, norms_of
from rekindle.methods.selection import Share, norm_layers, plain_weights
from rekindle.optimizers import StateReset
from rekindle.projection.receipt import BlockRecord, Receipt
from rekindle.projection.targets import Targets


class SoftWeightRescaling(KeptNorms):
    """W_l ← c_l·W_l with c_l = (λ·‖W_l⁰‖ + (1 − λ)·‖W_l‖)/‖W_l‖ after every step (Oh et al., 2025, arXiv:2507.04683).

    Layers are taken in the order of registration. A bias is multiplied by the product of all c up to its layer, so
    that a chain of layers with ReLU is multiplied as a whole and decides as before. The scales of normalization
    layers are rescaled too; they take out what stands in front of them, so before the last of them a bias has the
    factor of its own layer, and the product begins at it (as printed, the algorithm also takes in the layer before it,
    which would change the function). `head` is the λ of the output layer, where it differs (the
    paper's λ_c). Across residual connections the function does change. Call `remember(model)` while the model is new.
    The paper searches λ in 1e-4 to 1.

    >>> model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> method = SoftWeightRescaling(0.5)
    >>> method.remember(model)
    >>> first = model[0].weight.norm().item()
    >>> _ = model[0].weight.data.mul_(3)
    >>> _ = method(model)
    >>> round(model[0].weight.norm().item() / first, 4)
    2.0

    Args:
        coefficient: how far a norm goes back to its start at each step.
        head: whether the output layer is included.
        targets: which parameters, as for `rekindle.plan`.
        norms: the norms to keep by name, instead of those that `remember` saw.
        seed: what its own random numbers start from, when the call gives no generator.
    """

    name = "soft-weight-rescaling"
    moment = "step"

    def __init__(
        self,
        coefficient: float = 1e-3,
        head: float | None = None,
        *,
        targets: Targets = "layers",
        norms: Mapping[str, float] | None = None,
        seed: int = 0,
    ) -> None:
        if not 0 <= coefficient <= 1 or not 0 <= (head or 0) <= 1:
            raise ValueError(f"coefficient={coefficient} and head={head} must lie between 0 and 1")
        super().__init__(targets=targets, norms=norms, seed=seed)
        self.coefficient, self.head = coefficient, head

    def choose(self, model: nn.Module) -> tuple[list[Share], dict[str, str]]:
        """Weights and scales of normalization layers, in the order of registration."""
        picked, skipped = plain_weights(model, self.targets)
        if parts := [each.name for each in picked if not each.whole]:
            raise ValueError(f"{parts[0]!r} is targeted in part: soft weight rescaling treats whole weights")
        named = {id(parameter): name for name, parameter in names.named_parameters(model)}
        layers: dict[str, Share] = {}
        for each in picked:
            bias, head = each.bias(), each.entry.role == "head"
            held = each.parameters()[each.name]
            layers[each.name] = _Rescaled(each.name, held, None, bias, named.get(id(bias), ""), head=head)
        for name, norm in norm_layers(model).items():
            scale = norm._parameters.get("weight")
            if scale is not None:
                weight = f"{name}.weight"
                layers[weight] = _Rescaled(weight, scale, None, norm._parameters.get("bias"), f"{name}.bias", norm=True)
        return [layers[name] for name, _ in names.named_parameters(model) if name in layers], skipped

    @torch.no_grad()
    def apply(self, call: Call) -> Receipt:
        """Rescale; a weight of norm zero stays."""
        shares, skipped = self.weights(call.model)
        layers = [share for share in shares if isinstance(share, _Rescaled)]
        first, now = self.first(shares), norms_of(shares)
        last = max((number for number, layer in enumerate(layers) if layer.norm), default=0)
        factors: list[float] = []
        biases: list[tuple[_Rescaled, float]] = []
        product = 1.0
        for number, (layer, start, norm) in enumerate(zip(layers, first, now, strict=True)):
            pull = self.head if self.head is not None and layer.head else self.coefficient
            factors.append((pull * start + (1 - pull) * norm) / norm if norm > 0 else 1.0)
            product = product * factors[-1] if number >= last else factors[-1]
            if number == last and layer.norm:
                product = factors[-1]
            if layer.bias is not None:
                biases.append((layer, product))
        weights: list[Tensor] = [layer.parameter for layer in layers]
        torch._foreach_mul_(weights, factors)
        if biases:
            offsets = [layer.bias for layer, _ in biases if layer.bias is not None]
            torch._foreach_mul_(offsets, [factor for _, factor in biases])
        records = [
            BlockRecord(layer.name, norm_before=norm, norm_after=norm * factor)
            for layer, norm, factor in zip(layers, now, factors, strict=True)
        ]
        records += [BlockRecord(layer.bias_name, scale=factor) for layer, factor in biases]
        return Receipt(self.name, tuple(records), skipped, optimizer=StateReset("none"))


@dataclass(frozen=True)
class _Rescaled(Share):
    """A weight or the scale of a normalization layer, with the bias that is added behind it."""

    bias: Tensor | None = None
    bias_name: str = ""
    norm: bool = False
    head: bool = False
