"""Many networks in one: equal modules whose weights lie in one stack, trained by one pass and one fused Adam.

    stack = Stack(models, optimizers)     # every model's parameters are views of the stack from here on
    losses, right = stack.pass_(x, y)     # x holds one batch per model, one after the other
    losses.sum().backward()
    stack.step()

A model stays an ordinary module: what changes it in place (a remedy, an optimizer's reset) changes the stack. Two
ways of doing the pass: where every weight belongs to a known layer the layers know that the batch has parts, and the
rest of the forward pass sees one large batch; else `torch.func.vmap`. Both are compared with the models' own passes
before they are used.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.optim import Adam, AdamW, Optimizer

_CLOSE = 1e-3  # relative; a wrong pass is off by the size of the logits


class Unstackable(Exception):
    """These models or optimizers cannot be trained as one; the message says why."""


class Stack:
    """Parameters, buffers and Adam moments of equal models, in stacks whose first dimension is the model.

    The models' parameters keep their identity; their data become views. Optimizers are one Adam or AdamW per model,
    with options of its own.

    >>> models = [nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)) for _ in range(4)]
    >>> stack = Stack(models, [Adam(model.parameters()) for model in models])
    >>> losses, right = stack.pass_(torch.randn(4, 5, 2), torch.zeros(4, 5, dtype=torch.long))
    >>> losses.sum().backward(); stack.step()
    >>> losses.shape, bool((models[1][0].weight == stack.parameters["0.weight"][1]).all())
    (torch.Size([4]), True)
    """

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self.models, self.optimizers = list(models), list(optimizers)
        if len({signature(each, its) for each, its in zip(models, optimizers, strict=True)}) != 1:
            raise Unstackable("the models or their optimizers differ")
        own = [dict(model.named_parameters()) for model in models]
        held = [dict(model.named_buffers()) for model in models]
        self.parameters = {name: _stacked([each[name] for each in own]) for name in own[0]}
        self.buffers = {name: _stacked([each[name] for each in held]) for name in held[0]}
        for name, parameter in own[0].items():
            self.parameters[name].requires_grad_(parameter.requires_grad)
        self._own = own
        self._slots = {name: [self._slot(name, key) for key in _SLOTS] for name in self._trained}
        self._counts = {name: torch.stack([self._count(name, i) for i in range(len(self))]) for name in self._trained}
        for i, optimizer in enumerate(self.optimizers):
            for name, (first, second) in self._slots.items():
                state = {"step": self._counts[name][i], "exp_avg": first[i], "exp_avg_sq": second[i]}
                optimizer.state[own[i][name]] = state
        self.regroup()
        self._forward: Callable[[Tensor], Tensor] | None = None

    def __len__(self) -> int:
        return len(self.models)

    @property
    def _trained(self) -> list[str]:
        return [name for name, parameter in self.parameters.items() if parameter.requires_grad]

    def _slot(self, name: str, key: str) -> Tensor:
        stack = torch.zeros_like(self.parameters[name])
        for i, optimizer in enumerate(self.optimizers):
            state = optimizer.state.get(self._own[i][name])
            if state:
                stack[i] = state[key]
        return stack

    def _count(self, name: str, i: int) -> Tensor:
        state = self.optimizers[i].state.get(self._own[i][name])
        return state["step"].float() if state else torch.zeros(())

    def train(self) -> None:
        """Every model in training mode."""
        for model in self.models:
            model.train()
        self._forward = None

    def pass_(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of every model and how many of its answers are right, for x and y (models, batch, …)."""
        if self._forward is None:
            self._forward = self._checked(x)
        logits = self._forward(x)
        answers, labels = logits.flatten(1, -2), y.flatten(1)
        losses = cross_entropy(answers.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape).mean(1)
        return losses, (answers.detach().argmax(-1) == labels).sum(1)

    def _checked(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        """The first way of doing the pass that gives what the first and the last model give on their own."""
        for way in (self._in_parts, self._mapped):
            kept = {name: buffer.clone() for name, buffer in self.buffers.items()}
            try:
                forward = way()
                with torch.no_grad():
                    mine = forward(x)
                    pairs = [(mine[i], self.models[i](x[i])) for i in (0, len(self) - 1)]
            except (RuntimeError, NotImplementedError, TypeError, ValueError, Unstackable):
                continue
            finally:
                for name, buffer in kept.items():
                    self.buffers[name].copy_(buffer)
            if all(got.shape == one.shape and _near(got, one) for got, one in pairs):
                return forward
        raise Unstackable(f"{type(self.models[0]).__name__} computes something else when it is stacked")

    def _in_parts(self) -> Callable[[Tensor], Tensor]:
        """The model's own forward pass with layers that know of the parts, on all batches as one."""
        template = copy.deepcopy(self.models[0])
        stacks = {id(tensor): self.parameters[name] for name, tensor in template.named_parameters()}
        stacks |= {id(tensor): self.buffers[name] for name, tensor in template.named_buffers()}
        for name, module in list(template.named_modules()):
            tensors = [*module._parameters.values(), *module._buffers.values()]
            if any(each is not None for each in tensors):
                if _many(module) is None or module is template:
                    raise Unstackable(f"{name}: a {type(module).__name__} has weights of its own")
                above, _, last = name.rpartition(".")
                setattr(template.get_submodule(above), last, _Layer(module, stacks))

        def forward(x: Tensor) -> Tensor:
            out: Tensor = template(x.flatten(0, 1))
            return out.view(len(self), -1, *out.shape[1:])

        return forward

    def _mapped(self) -> Callable[[Tensor], Tensor]:
        template = copy.deepcopy(self.models[0])

        def one(parameters: Any, buffers: Any, x: Tensor) -> Any:
            with sdpa_kernel(SDPBackend.MATH):  # the others cannot be mapped
                return functional_call(template, (parameters, buffers), (x,))

        mapped = vmap(one)
        return lambda x: mapped(self.parameters, self.buffers, x)

    def clip(self, norm: float) -> None:
        """Clip the gradient of every model to this norm, as `torch.nn.utils.clip_grad_norm_` does."""
        grads = [grad for name in self._trained if (grad := self.parameters[name].grad) is not None]
        total = torch.stack([grad.flatten(1).norm(dim=1) for grad in grads]).norm(dim=0)
        factor = (norm / (total + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(factor.view(-1, *[1] * (grad.dim() - 1)))

    def show_gradients(self, i: int) -> None:
        """Give model `i` its gradients, as views."""
        for name, parameter in self._own[i].items():
            grad = self.parameters[name].grad
            parameter.grad = None if grad is None else grad[i]

    def hide_gradients(self) -> None:
        """Forget the gradients of the last step."""
        for stack in self.parameters.values():
            stack.grad = None

    def collect(self, i: int) -> None:
        """Take back what an event replaced or removed in the state of optimizer `i`, and look at its options again."""
        for name, (first, second) in self._slots.items():
            parameter, optimizer = self._own[i][name], self.optimizers[i]
            state = optimizer.state.get(parameter) or {}
            mine = {"step": self._counts[name][i], "exp_avg": first[i], "exp_avg_sq": second[i]}
            for key, view in mine.items():
                if state.get(key) is not view:
                    view.copy_(torch.as_tensor(state.get(key, 0.0)))
            optimizer.state[parameter] = mine
        self.regroup()

    def regroup(self) -> None:
        """Which models one call of the fused Adam can step: neighbours with equal options and equal counts."""
        options = [_options(optimizer) for optimizer in self.optimizers]
        counts = list(zip(*(each.tolist() for each in self._counts.values()), strict=True))
        keys = list(zip(options, counts, strict=True))
        self._parts = []
        for _, run in groupby(range(len(self)), key=keys.__getitem__):
            places = list(run)
            self._parts.append((slice(places[0], places[-1] + 1), self.optimizers[places[0]]))

    @torch.no_grad()
    def step(self) -> None:
        """One step of every model's optimizer; learning rates are read anew."""
        for name in self._trained:
            self._counts[name].add_(1)
        present = [name for name in self._trained if self.parameters[name].grad is not None]
        for part, optimizer in self._parts:
            group = optimizer.param_groups[0]
            kernel = torch._fused_adamw_ if isinstance(optimizer, AdamW) else torch._fused_adam_
            kernel(
                [self.parameters[name].detach()[part] for name in present],
                [self.parameters[name].grad[part] for name in present],  # type: ignore[index]
                [self._slots[name][0][part] for name in present],
                [self._slots[name][1][part] for name in present],
                [],
                [self._counts[name][part.start] for name in present],
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )


_SLOTS = ("exp_avg", "exp_avg_sq")


def signature(model: nn.Module, optimizer: Optimizer) -> Any:
    """What two models must have in common to be trained as one; an error for one that cannot be.

    >>> one, other = nn.Linear(2, 3), nn.Linear(2, 4)
    >>> signature(one, Adam(one.parameters())) == signature(other, Adam(other.parameters()))
    False
    """
    if type(optimizer) not in (Adam, AdamW) or len(optimizer.param_groups) != 1:
        raise Unstackable(f"{type(optimizer).__name__} is not one Adam with one group")
    if hooks_of(optimizer, "pre") or hooks_of(optimizer, "post"):
        raise Unstackable("the optimizer has hooks")
    group = optimizer.param_groups[0]
    if group["amsgrad"] or group["maximize"] or isinstance(group["lr"], Tensor):
        raise Unstackable("only plain Adam is done for many networks at once")
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if {id(parameter) for parameter in group["params"]} != trained:
        raise Unstackable("the optimizer trains something else than the model")
    for name, module in model.named_modules():
        if (isinstance(module, nn.Dropout) and module.p) or hasattr(module, "parametrizations"):
            raise Unstackable(f"{name}: {type(module).__name__} is not done for many networks at once")
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            raise Unstackable(f"{name or 'the model'} has hooks")
    tensors = [*model.named_parameters(), *model.named_buffers()]
    shapes = [(name, tuple(each.shape), str(each.dtype), each.requires_grad) for name, each in tensors]
    return (type(optimizer), repr(model), tuple(shapes))


def hooks_of(optimizer: Optimizer, when: str) -> list[Callable[..., Any]]:
    """What is to be called before ("pre") or after ("post") a step of the optimizer, which a stack takes for it.

    >>> adam = Adam([nn.Parameter(torch.ones(1))])
    >>> _ = adam.register_step_post_hook(lambda *_: None)
    >>> len(hooks_of(adam, "pre")), len(hooks_of(adam, "post"))
    (0, 1)
    """
    return list(getattr(optimizer, f"_optimizer_step_{when}_hooks").values())


def _options(optimizer: Optimizer) -> tuple[Any, ...]:
    group = optimizer.param_groups[0]
    # Not only the rate of now: rates that change in other ways may meet.
    rates = (group["lr"], group.get("initial_lr"), group.get("raised"))
    return (type(optimizer), rates, tuple(group["betas"]), group["eps"], group["weight_decay"])


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    stack = torch.stack([tensor.detach() for tensor in tensors])
    for tensor, view in zip(tensors, stack, strict=True):
        tensor.data = view
    return stack


def _near(one: Tensor, other: Tensor) -> bool:
    size = other.abs().max()
    return bool(((one - other).abs().max() <= _CLOSE * size + 1e-6) | ~size.isfinite())


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


class _Layer(nn.Module):
    """A layer of all models: the options of one, the stacked tensors of all."""

    def __init__(self, layer: nn.Module, stacks: dict[int, Tensor]) -> None:
        super().__init__()
        tensors: Iterable[Tensor | None] = [*layer._parameters.values(), *layer._buffers.values()]
        self._of = (layer, _many(layer), [None if each is None else stacks[id(each)] for each in tensors])

    def forward(self, x: Tensor) -> Tensor:
        """The layer on batches of all models, one after the other."""
        layer, compute, stacks = self._of
        assert compute is not None
        return compute(layer, x, *stacks)


def _many(layer: nn.Module) -> Callable[..., Tensor] | None:
    """What computes a layer for many models: known here, or its own method `stacked`."""
    return _LAYERS.get(type(layer), getattr(type(layer), "stacked", None))
