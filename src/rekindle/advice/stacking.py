"""Many networks in one: equal modules whose weights lie in one stack, trained by one pass and one fused Adam.

    stack = Stack(models, optimizers)     # every model's parameters are views of the stack from here on
    losses, right = stack.pass_(x, y)     # x holds one batch per model, one after the other
    losses.sum().backward()
    stack.step()

A model stays an ordinary module: what changes it in place (a remedy, an optimizer's reset) changes the stack. Every
weight must belong to a known layer: these know that the batch has parts, and the rest of the forward pass sees one
large batch. `losses(batches)` is any `loss(model, batch)` of each model, after `check(loss, batches)`, by
`torch.func.vmap` where a weight belongs to none. Both are compared with the models' own passes first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.optim import Adam, AdamW, Optimizer
from torch.utils._pytree import tree_map

from rekindle.advice.stacked_layers import StackedLayer, computing
from rekindle.advice.stacked_layers import Unstackable as Unstackable
from rekindle.engine.devices import callers_device
from rekindle.isolation import Batch, Loss, explained

_CLOSE = 1e-3  # relative; a wrong pass is off by the size of the logits


W = TypeVar("W")
Batches = Sequence[Any]
"""One batch per model."""


class WithLoss(nn.Module):
    """The loss as a module's forward, so that torch.func can run the model with other tensors."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, batch: Batch) -> Tensor:
        """The loss of the model on a batch."""
        with explained(self.model, batch), callers_device():
            return self._loss(self.model, batch)


class Stack:
    """Parameters, buffers and Adam moments of equal models, in stacks whose first dimension is the model.

    The models' parameters keep their identity; their data become views. Optimizers are one Adam or AdamW per model,
    with options of its own, that `step` takes together, but for those `apart`, whose rate changes within a step.
    Without optimizers only the passes are those of the stack.

    >>> models = [nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)) for _ in range(4)]
    >>> stack = Stack(models, [Adam(model.parameters()) for model in models])
    >>> losses, right = stack.pass_(torch.randn(4, 5, 2), torch.zeros(4, 5, dtype=torch.long))
    >>> losses.sum().backward(); stack.step()
    >>> losses.shape, bool((models[1][0].weight == stack.parameters["0.weight"][1]).all())
    (torch.Size([4]), True)
    """

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer] = (), *, apart: Collection[int] = ()
    ) -> None:
        self.models, self.optimizers, self._apart = list(models), list(optimizers), frozenset(apart)
        signatures = {architecture(each) for each in models}
        if optimizers:
            signatures = {signature(each, its) for each, its in zip(models, optimizers, strict=True)}
        if len(signatures) != 1:
            raise Unstackable("the models or their optimizers differ")
        own = [dict(model.named_parameters()) for model in models]
        held = [dict(model.named_buffers()) for model in models]
        self.parameters = {name: _stacked([each[name] for each in own]) for name in own[0]}
        self.buffers = {name: _stacked([each[name] for each in held]) for name in held[0]}
        for name, parameter in own[0].items():
            self.parameters[name].requires_grad_(parameter.requires_grad)
        self._own = own
        self._forward: Callable[[Tensor], Tensor] | None = None
        self._losses: Callable[[Batches], Tensor] | None = None
        held_slots = self._trained if optimizers else []
        self._slots = {name: [self._slot(name, key) for key in _SLOTS] for name in held_slots}
        self._counts = {name: torch.stack([self._count(name, i) for i in range(len(self))]) for name in held_slots}
        for i, optimizer in enumerate(self.optimizers):
            for name, (first, second) in self._slots.items():
                state = {"step": self._counts[name][i], "exp_avg": first[i], "exp_avg_sq": second[i]}
                optimizer.state[own[i][name]] = state
        self.regroup()

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
        self._forward = self._losses = None

    def pass_(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of every model and how many of its answers are right, for x and y (models, batch, …)."""
        if self._forward is None:
            self._forward = self._checked([self._in_parts], lambda way: way(x), lambda i: self.models[i](x[i]))
        logits = self._forward(x)
        answers, labels = logits.flatten(1, -2), y.flatten(1)
        losses = cross_entropy(answers.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape).mean(1)
        return losses, (answers.detach().argmax(-1) == labels).sum(1)

    def check(self, loss: Loss, batches: Batches) -> None:
        """Find the way in which `losses` does this loss; nothing of the models changes."""
        ways = (lambda: self._losses_in_parts(loss), lambda: self._losses_mapped(loss))
        with callers_device():
            self._losses = self._checked(ways, lambda way: way(batches), lambda i: loss(self.models[i], batches[i]))

    def losses(self, batches: Batches) -> Tensor:
        """The loss of `check` of every model, each on its own batch; batches may be the same, but not differ in shape.

        >>> stack = Stack([nn.Linear(2, 1) for _ in range(3)])
        >>> stack.check(lambda model, x: model(x).square().mean(), [torch.ones(4, 2)] * 3)
        >>> stack.losses([torch.ones(4, 2)] * 3).shape
        torch.Size([3])
        """
        assert self._losses is not None, "call check() first"
        with callers_device():
            return self._losses(batches)

    def _checked(self, ways: Sequence[Callable[[], W]], do: Callable[[W], Tensor], own: Callable[[int], Tensor]) -> W:
        """The first way of doing the pass that gives what the first and the last model give on their own."""
        why = f"{type(self.models[0]).__name__} computes something else when it is stacked"
        for way in ways:
            kept = {name: buffer.clone() for name, buffer in self.buffers.items()}
            try:
                made = way()
                with torch.no_grad():
                    mine = do(made)
                    pairs = [(mine[i], own(i)) for i in (0, len(self) - 1)]
            except Exception as error:  # whatever a model or a loss raises where it is called otherwise
                why = str(error)
                continue
            finally:
                for name, buffer in kept.items():
                    self.buffers[name].copy_(buffer)
            if all(got.shape == one.shape and _near(got, one) for got, one in pairs):
                return made
        raise Unstackable(why)

    def _template(self) -> nn.Module:
        """The model with layers that know of the parts of a batch."""
        template = copy.deepcopy(self.models[0])
        stacks = {id(tensor): self.parameters[name] for name, tensor in template.named_parameters()}
        stacks |= {id(tensor): self.buffers[name] for name, tensor in template.named_buffers()}
        for name, module in list(template.named_modules()):
            tensors = [*module._parameters.values(), *module._buffers.values()]
            if any(each is not None for each in tensors):
                if computing(module) is None or module is template:
                    raise Unstackable(f"{name}: a {type(module).__name__} has weights of its own")
                above, _, last = name.rpartition(".")
                setattr(template.get_submodule(above), last, StackedLayer(module, stacks))
        return template

    def _in_parts(self) -> Callable[[Tensor], Tensor]:
        """The model's own forward pass, on all batches as one."""
        template = self._template()

        def forward(x: Tensor) -> Tensor:
            out: Tensor = template(x.flatten(0, 1))
            return out.view(len(self), -1, *out.shape[1:])

        return forward

    def _losses_in_parts(self, loss: Loss) -> Callable[[Batches], Tensor]:
        """The loss asks for one output: that of all models, then each gets its own."""
        template = self._template()

        def losses(batches: Batches) -> Tensor:
            asked = {id(batch): _asked(loss, batch) for batch in batches}
            args, options = _one_batch(_of_each([asked[id(batch)] for batch in batches]))
            out = template(*args, **options)
            own = out.view(len(self), -1, *out.shape[1:])
            return _each(lambda each, batch: loss(_Answer(each), batch), batches, own)  # type: ignore[arg-type]

        return losses

    def _losses_mapped(self, loss: Loss) -> Callable[[Batches], Tensor]:
        template = WithLoss(copy.deepcopy(self.models[0]), loss)
        parameters, buffers = (
            {f"model.{name}": each for name, each in held.items()} for held in (self.parameters, self.buffers)
        )

        def one(tensors: Any, batch: Any) -> Any:
            with sdpa_kernel(SDPBackend.MATH):  # the others cannot be mapped
                return functional_call(template, tensors, (batch,))

        return lambda batches: _each(one, batches, (parameters, buffers))

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
        """Which models one call of the fused Adam can step: neighbors with equal options and equal counts."""
        options = [_options(optimizer) for optimizer in self.optimizers]
        counts = list(zip(*(each.tolist() for each in self._counts.values()), strict=True))
        keys = [(*pair, i if i in self._apart else None) for i, pair in enumerate(zip(options, counts, strict=True))]
        self._parts: list[tuple[slice, Optimizer]] = []
        for _, run in groupby(range(len(keys)), key=keys.__getitem__):
            places = list(run)
            self._parts.append((slice(places[0], places[-1] + 1), self.optimizers[places[0]]))

    @torch.no_grad()
    def step(self) -> None:
        """One step of every model's optimizer; learning rates are read anew."""
        for name in self._counts:
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


def architecture(model: nn.Module) -> object:
    """What two models must have in common to do their passes as one; an error for one that cannot.

    >>> architecture(nn.Linear(2, 3)) == architecture(nn.Linear(2, 3)), architecture(nn.Linear(2, 3))[0]
    (True, 'Linear(in_features=2, out_features=3, bias=True)')
    """
    for name, module in model.named_modules():
        if (isinstance(module, nn.Dropout) and module.p) or hasattr(module, "parametrizations"):
            raise Unstackable(f"{name}: {type(module).__name__} is not done for many networks at once")
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            raise Unstackable(f"{name or 'the model'} has hooks")
    tensors = [*model.named_parameters(), *model.named_buffers()]
    shapes = [(name, tuple(each.shape), str(each.dtype), each.requires_grad) for name, each in tensors]
    return (repr(model), tuple(shapes))


def signature(model: nn.Module, optimizer: Optimizer) -> object:
    """What two models must have in common to be trained as one; an error for one that cannot be."""
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
    return (type(optimizer), architecture(model))


def hooks_of(optimizer: Optimizer, when: str) -> list[Callable[..., Any]]:
    """What is to be called before ("pre") or after ("post") a step of the optimizer, which a stack takes for it."""
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


class _Question(Exception):
    """What a loss calls the model with."""


def _asked(loss: Loss, batch: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def ask(*args: object, **options: object) -> object:
        raise _Question(args, options)

    try:
        loss(ask, batch)  # type: ignore[arg-type]
    except _Question as asked:
        args, options = asked.args
        return args, options
    raise Unstackable("the loss does not call the model")


class _Answer:
    """Stands for a model whose output is there: a loss that calls it twice cannot be done in parts."""

    def __init__(self, output: Tensor) -> None:
        self._output: Tensor | None = output

    def __call__(self, *args: object, **options: object) -> Tensor:
        output, self._output = self._output, None
        if output is None:
            raise Unstackable("the loss calls the model twice")
        return output


def _each(function: Callable[[Any, Any], Any], batches: Batches, own: Any) -> Tensor:
    """What the function gives for each model and its batch. One batch for all is not copied, and may be anything."""
    first = batches[0]
    if all(batch is first for batch in batches):
        return vmap(lambda mine: function(mine, first))(own)  # type: ignore[no-any-return]
    return vmap(function)(own, _of_each(batches))  # type: ignore[no-any-return]


def _of_each(trees: Sequence[Any]) -> Any:
    """Nested tensors with the model as first dimension; what is no tensor, or a single number, is that of the first."""
    distinct = {id(tree): tree for tree in trees}
    places = {key: place for place, key in enumerate(distinct)}
    chosen = torch.tensor([places[id(tree)] for tree in trees])

    def joined(*parts: Any) -> Any:
        if not isinstance(parts[0], Tensor) or not parts[0].dim():
            return parts[0]
        if len(parts) == 1:
            return parts[0].expand(len(trees), *parts[0].shape)
        return torch.stack(parts)[chosen.to(parts[0].device)]

    return tree_map(joined, *distinct.values())


def _one_batch(tree: Any) -> Any:
    """The batches of all models one after the other."""
    return tree_map(lambda part: part.flatten(0, 1) if isinstance(part, Tensor) and part.dim() > 1 else part, tree)


def _near(one: Tensor, other: Tensor) -> bool:
    size = other.abs().max()
    return bool(((one - other).abs().max() <= _CLOSE * size + 1e-6) | ~size.isfinite())
