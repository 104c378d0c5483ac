"""Layers of many networks in one: the options of one, the weights of all, on their batches one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Unstackable(Exception):
    """These models or optimizers cannot be trained as one; the message says why."""


class _Linear(torch.autograd.Function):
    """x (models, rows, in) times weight (models, out, in): its gradient has the layout of the weight, so no copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias = bias is not None
        if bias is None:
            return torch.bmm(x, weight.mT)
        return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return (
            torch.bmm(grad, weight) if ctx.needs_input_grad[0] else None,
            torch.bmm(grad.mT, x) if ctx.needs_input_grad[1] else None,
            grad.sum(1) if ctx.bias else None,
        )


def _linear(layer: nn.Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    parts = x.reshape(len(weight), -1, x.shape[-1])
    out: Tensor = _Linear.apply(parts, weight, bias)  # type: ignore[no-untyped-call]
    return out.view(*x.shape[:-1], -1)


def _conv(layer: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = _side_by_side(x, len(weight))
    if layer.padding_mode != "zeros":
        raise Unstackable(f"padding_mode={layer.padding_mode!r}")
    out = F.conv2d(
        wide,
        weight.flatten(0, 1),
        None if bias is None else bias.flatten(),
        layer.stride,
        layer.padding,
        layer.dilation,
        layer.groups * len(weight),
    )
    return _one_after_the_other(out, len(weight))


def _batch_norm(layer: nn.BatchNorm2d, x: Tensor, *stacks: Tensor | None) -> Tensor:
    weight, bias, mean, variance, count = stacks
    models = len(x) if weight is None else len(weight)
    if weight is None or bias is None or mean is None or variance is None or layer.momentum is None:
        raise Unstackable("a BatchNorm without weights, statistics or momentum")
    if layer.training and count is not None:
        count.add_(1)
    out = F.batch_norm(
        _side_by_side(x, models),
        mean.flatten(),
        variance.flatten(),
        weight.flatten(),
        bias.flatten(),
        layer.training,
        layer.momentum,
        layer.eps,
    )
    return _one_after_the_other(out, models)


def _layer_norm(layer: nn.LayerNorm, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    plain = _parted(F.layer_norm(x, layer.normalized_shape, None, None, layer.eps), len(weight))
    inner = (1,) * (x.dim() - len(layer.normalized_shape))
    scaled = plain * weight.view(len(weight), *inner, *layer.normalized_shape)
    if bias is not None:
        scaled = scaled + bias.view(len(weight), *inner, *layer.normalized_shape)
    return scaled.flatten(0, 1)


def _embedding(layer: nn.Embedding, x: Tensor, weight: Tensor) -> Tensor:
    if layer.padding_idx is not None or layer.max_norm is not None or layer.sparse:
        raise Unstackable("an Embedding with options")
    first = torch.arange(len(weight)) * weight.shape[1]
    rows = _parted(x, len(weight)) + first.view(-1, *[1] * x.dim())
    return F.embedding(rows.flatten(0, 1), weight.flatten(0, 1))


def _parted(x: Tensor, models: int) -> Tensor:
    """(models · batch, …) → (models, batch, …)."""
    return x.reshape(models, -1, *x.shape[1:])


def _side_by_side(x: Tensor, models: int) -> Tensor:
    """(models · batch, channels, …) → (batch, models · channels, …)."""
    return _parted(x, models).transpose(0, 1).flatten(1, 2)


def _one_after_the_other(x: Tensor, models: int) -> Tensor:
    return x.view(len(x), models, -1, *x.shape[2:]).transpose(0, 1).flatten(0, 1)


_LAYERS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Linear: _linear,
    nn.Conv2d: _conv,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.LayerNorm: _layer_norm,
    nn.Embedding: _embedding,
}


class StackedLayer(nn.Module):
    """A layer of all models; `stacks` holds the stacked tensor of each tensor of the layer, by id."""

    def __init__(self, layer: nn.Module, stacks: dict[int, Tensor]) -> None:
        super().__init__()
        tensors: Iterable[Tensor | None] = [*layer._parameters.values(), *layer._buffers.values()]
        self._of = (layer, computing(layer), [None if each is None else stacks[id(each)] for each in tensors])

    def forward(self, x: Tensor) -> Tensor:
        """The layer on batches of all models, one after the other."""
        layer, compute, stacks = self._of
        assert compute is not None
        return compute(layer, x, *stacks)


def computing(layer: nn.Module) -> Callable[..., Tensor] | None:
    """What computes a layer for many models: known here, or its own method `stacked`."""
    return _LAYERS.get(type(layer), getattr(type(layer), "stacked", None))
