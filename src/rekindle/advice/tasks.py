"""What a probe learns: the user's batches as they are, or with targets that a network has never seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from rekindle.isolation import Batch, Loss, call

P = ParamSpec("P")
R = TypeVar("R")
Task = Literal["next", "random-labels", "regression", "next-token"]


_WORDS = {"batches": "new_batches", "seconds": "budget"}


def same_words(verb: Callable[P, R]) -> Callable[P, R]:
    """A verb that says what an argument is called where it is given another verb's word.

    >>> @same_words
    ... def wait(budget: int) -> int:
    ...     return budget
    >>> wait(seconds=3)
    Traceback (most recent call last):
    TypeError: wait() has no seconds=: it is called budget=
    """

    @wraps(verb)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for other in kwargs.keys() & _WORDS.keys():
            raise TypeError(f"{verb.__name__}() has no {other}=: it is called {_WORDS[other]}=")
        return verb(*args, **kwargs)

    return checked


@dataclass(frozen=True)
class Prepared:
    """Batches, and the loss that goes with them."""

    batches: list[Any]
    loss: Loss


def prepare(
    task: Task,
    model: nn.Module,
    batches: Iterable[Batch],
    loss: Loss | None,
    fresh: Callable[[], Mapping[str, Tensor]],
    generator: torch.Generator,
) -> Prepared:
    """The batches and the loss of a task. Targets are drawn from `generator`."""
    given = list(batches)
    if not given:
        raise ValueError("there are no batches to learn from")
    if task == "next":
        return Prepared(given, default_loss if loss is None else loss)
    if loss is not None:
        raise ValueError(f"task={task!r} has a loss of its own: leave loss= out, or use task='next'")
    if task == "next-token":
        return Prepared(given, next_token_loss)
    if task == "random-labels":
        return Prepared([(batch, _labels(model, batch, generator)) for batch in given], _label_loss)
    if task == "regression":
        # The outputs of one more fresh network: learnable, and unlike anything that was learned before (Lyle 2022).
        other = fresh()
        return Prepared([(batch, _targets(model, batch, other)) for batch in given], _regression_loss)
    raise ValueError(f"task={task!r} is not one of {', '.join(map(repr, get_args(Task)))}")


def default_loss(model: nn.Module, batch: object) -> Tensor:
    """Cross entropy or squared error of (inputs, targets), or the loss that a transformers model computes itself.

    >>> float(default_loss(nn.Identity(), (torch.zeros(1, 2), torch.zeros(1, dtype=torch.long)))) > 0.69
    True
    """
    if isinstance(batch, Mapping):
        found = getattr(call(model, batch), "loss", None)
        if isinstance(found, Tensor):
            return found
    elif (
        isinstance(batch, Sequence) and not isinstance(batch, str) and len(batch) == 2 and isinstance(batch[1], Tensor)
    ):
        out, target = output(model, batch), batch[1]
        if target.is_floating_point():
            if target.numel() != out.numel():
                raise ValueError(
                    f"the targets are {str(target.dtype).removeprefix('torch.')} of shape {tuple(target.shape)}, the "
                    f"outputs have shape {tuple(out.shape)}: class labels are integers (labels.long()), and targets of "
                    "a regression have the shape of the outputs"
                )
            return functional.mse_loss(out.reshape(target.shape), target)
        return functional.cross_entropy(out.flatten(0, -2), target.flatten())
    raise ValueError("no loss was given, and the batches are not (inputs, targets): pass loss=lambda model, batch: …")


def next_token_loss(model: nn.Module, batch: Any) -> Tensor:
    """Cross entropy of the next token: batches are tokens, or dicts with `input_ids`."""
    tokens = batch["input_ids"] if isinstance(batch, Mapping) else batch if isinstance(batch, Tensor) else batch[0]
    logits = output(model, tokens if not isinstance(batch, Mapping) else batch)
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def output(model: nn.Module, batch: Any) -> Tensor:
    """The model's output as one tensor: itself, its `.logits`, or the first tensor in it."""
    found = call(model, batch)
    if isinstance(found, Tensor):
        return found
    logits = getattr(found, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    inside = found.values() if isinstance(found, Mapping) else found if isinstance(found, Sequence) else ()
    first = next((value for value in inside if isinstance(value, Tensor) and value.dim()), None)
    if first is None:
        raise ValueError(f"the model's output is a {type(found).__name__} without a tensor: pass loss= and task='next'")
    return first


def _labels(model: nn.Module, batch: object, generator: torch.Generator) -> Tensor:
    with torch.no_grad():
        out = output(model, batch)
    if out.dim() < 2 or out.shape[-1] < 2:
        raise ValueError(f"task='random-labels' needs class scores, the output is {tuple(out.shape)}: use 'regression'")
    return torch.randint(out.shape[-1], out.shape[:-1], generator=generator).to(out.device)


def _label_loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    return functional.cross_entropy(output(model, inputs).flatten(0, -2), labels.flatten())


class _Output(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: object) -> Tensor:
        return output(self.model, batch)


def _targets(model: nn.Module, batch: object, other: Mapping[str, Tensor]) -> Tensor:
    lent = {f"model.{name}": tensor.detach().clone() for name, tensor in other.items()}
    with torch.no_grad():
        out = functional_call(_Output(model), lent, (batch,)).float()
    centered = out - out.mean(0, keepdim=True)
    return torch.sin(2 * centered / centered.square().mean().sqrt().clamp_min(1e-12))


def _regression_loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return functional.mse_loss(output(model, inputs).float(), targets)
