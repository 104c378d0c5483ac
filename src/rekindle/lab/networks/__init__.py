"""Networks that the laboratory studies, built by name: vision.py, transformers.py and dawn.py hold them.

    model = network("resnet18", shape=(3, 16, 16), classes=10, seed=0, width=8)

A builder is called as `builder(shape, classes, **options)` and draws its weights from torch's global random state, as
all torch modules do; `network` forks that state and seeds it, so that the seed alone decides the start. `shape` is one
input's shape without the batch, `(context,)` for text. Every network returns logits (…, classes). `register` adds your
own builder, a class or a function.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from rekindle import blocks
from rekindle.blocks.layouts import Recipe
from rekindle.isolation import forked_rng
from rekindle.lab.dawn.network import DAWN, DAWNConfig, Router
from rekindle.lab.networks.transformers import GPT, ViT, context
from rekindle.lab.networks.vision import CNN, MLP, VGG16, ResNet18, at_least_one

__all__ = ["CNN", "DAWN", "GPT", "MLP", "VGG16", "ResNet18", "ViT", "names", "network", "options", "register"]

# A remedy of the same seed that draws afresh must not draw this very start again.
_SALT = 0x6E6574776F726B

Builder = Callable[..., nn.Module]
B = TypeVar("B", bound=Builder)


def _dawn(shape: tuple[int, ...], classes: int, **sizes: Any) -> DAWN:
    # DAWN forks the random state by a seed of its own: draw that from the state that `network` has seeded.
    config = DAWNConfig(vocabulary=classes, length=context(shape), **sizes)
    return DAWN(config, seed=int(torch.randint(2**62, ())))


def _router_layout(router: Router) -> dict[str, Recipe]:
    parts = ("query", "key", "value")
    return {"attention.weight": blocks.matrices("(part head dim) in", part=parts, head=router.heads, heads="head")}


# DAWN's router attends through one fused layer, whose name does not say so.
blocks.register(Router, _router_layout)

_BUILT_IN: Mapping[str, Builder] = {
    "mlp": MLP,
    "cnn": CNN,
    "resnet18": ResNet18,
    "vgg16": VGG16,
    "vit": ViT,
    "gpt": GPT,
    "dawn": _dawn,
}
_own: dict[str, Builder] = {}


def network(name: str, *, shape: tuple[int, ...], classes: int, seed: int, **chosen: Any) -> nn.Module:
    """A new network by name, its start decided by the seed; torch's random state is left as it was.

    >>> network("mlp", shape=(4,), classes=2, seed=0, width=[8], activation="tanh").body
    Sequential(
      (0): Flatten(start_dim=1, end_dim=-1)
      (1): Linear(in_features=4, out_features=8, bias=True)
      (2): Tanh()
    )
    >>> network("mlp", shape=(4,), classes=2, seed=0, widht=8)
    Traceback (most recent call last):
    ValueError: the network 'mlp' has no option 'widht'; it has: width=128, depth=None, activation='relu', norm=None
    """
    made = builder(name)
    shape = tuple(shape)
    for size in shape:
        at_least_one(shape=size)
    at_least_one(classes=classes)
    _check_options(name, chosen)
    with forked_rng(torch.Generator().manual_seed(seed ^ _SALT)):
        model = made(shape, classes, **chosen)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"the builder of the network {name!r} must return a torch.nn.Module, not {type(model).__name__}"
        )
    return model


def register(name: str) -> Callable[[B], B]:
    """Add your own network under a name: a module class or function that takes `(shape, classes, **options)`.

    The last registration of a name counts, so that a file may be read again; the built-in names stay what they are.

    >>> @register("linear")
    ... def linear(shape, classes, *, bias=True):
    ...     return nn.Linear(*shape, classes, bias=bias)
    >>> network("linear", shape=(4,), classes=2, seed=0, bias=False)
    Linear(in_features=4, out_features=2, bias=False)
    >>> names()[-1]
    'linear'
    >>> _ = _own.pop("linear")
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f'register() takes the name of the network, as in @register("mine"), not {name!r}')
    if name in _BUILT_IN:
        raise ValueError(f"the network {name!r} is built in: register yours under another name")

    def keep(builder: B) -> B:
        if not callable(builder):
            raise TypeError(f"the builder of the network {name!r} must be callable, not {builder!r}")
        _own[name] = builder
        return builder

    return keep


def names() -> tuple[str, ...]:
    """Every network that there is, the built-in ones first.

    >>> names()[:7]
    ('mlp', 'cnn', 'resnet18', 'vgg16', 'vit', 'gpt', 'dawn')
    """
    return (*_BUILT_IN, *_own)


def options(name: str) -> dict[str, Any] | None:
    """The options of a network with their defaults (`...` where one must be given), None if its builder takes any.

    >>> options("resnet18")
    {'width': 64, 'stem': 'cifar'}
    """
    made = builder(name)
    if made is _dawn:
        config = {f.name: f.default for f in dataclasses.fields(DAWNConfig)}
        return {each: default for each, default in config.items() if each not in ("vocabulary", "length")}
    parameters = list(inspect.signature(made).parameters.values())
    if len(parameters) < 2:
        raise TypeError(f"the builder of the network {name!r} must take (shape, classes, **options)")
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return {p.name: ... if p.default is p.empty else p.default for p in parameters[2:]}


def _check_options(name: str, chosen: Mapping[str, Any]) -> None:
    known = options(name)
    if known is None:
        return
    listed = ", ".join(each if default is ... else f"{each}={default!r}" for each, default in known.items())
    for each in chosen:
        if each not in known:
            raise ValueError(f"the network {name!r} has no option {each!r}; it has: {listed or 'none'}")
    for each, default in known.items():
        if default is ... and each not in chosen:
            raise ValueError(f"the network {name!r} needs the option {each!r}; it has: {listed}")


def builder(name: str) -> Builder:
    """What builds the network of this name."""
    known = {**_BUILT_IN, **_own}
    if name not in known:
        close = difflib.get_close_matches(str(name), known, 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"there is no network {name!r}; there are: {', '.join(known)}.{hint}")
    return known[name]
