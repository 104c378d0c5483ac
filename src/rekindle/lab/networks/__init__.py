"""Networks that the laboratory studies, built by name: vision.py, transformers.py, stacks.py and dawn hold them.

    model = network("resnet18", shape=(3, 16, 16), classes=10, seed=0, width=8)

A builder is called as `builder(shape, classes, **options)` and draws its weights from torch's global random state, as
all torch modules do; `network` forks that state and seeds it, so that the seed alone decides the start. `shape` is one
input's shape without the batch, `(context,)` for text. Networks return logits (…, classes), or have a
`loss(outputs, y)` of their own. `register` adds your own builder, a class or a function.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from rekindle import blocks
from rekindle.blocks.layouts import Recipe
from rekindle.isolation import forked_rng
from rekindle.lab.dawn import DAWN, DAWNConfig, Router
from rekindle.lab.networks.stacks import VQVAE, ExpertGPT, SparseAutoencoder, adapters
from rekindle.lab.networks.transformers import GPT, ViT, context
from rekindle.lab.networks.vision import CNN, MLP, VGG16, ResNet18, at_least_one

__all__ = ["CNN", "DAWN", "GPT", "MLP", "VGG16", "ResNet18", "ViT", "names", "network", "register"]

# A remedy of the same seed that draws afresh must not draw this very start again.
_SALT = 0x6E6574776F726B

Builder = Callable[..., nn.Module]
B = TypeVar("B", bound=Builder)


def _dawn(shape: tuple[int, ...], classes: int, **sizes: Any) -> DAWN:
    # DAWN forks the random state by a seed of its own: draw that from the state that `network` has seeded.
    try:
        config = DAWNConfig(vocabulary=classes, length=context(shape), **sizes)
    except TypeError as error:
        raise ValueError(f"the network 'dawn' does not take {sizes}: {error}") from error
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
    "autoencoder": SparseAutoencoder,
    "vq-vae": VQVAE,
    "expert-gpt": ExpertGPT,
    "lora-gpt": adapters,
}
_own: dict[str, Builder] = {}


def network(name: str, *, shape: tuple[int, ...], classes: int, seed: int, **chosen: object) -> nn.Module:
    """A new network by name, its start decided by the seed; torch's random state is left as it was.

    >>> network("mlp", shape=(4,), classes=2, seed=0, width=[8], activation="tanh").body
    Sequential(
      (0): Flatten(start_dim=1, end_dim=-1)
      (1): Linear(in_features=4, out_features=8, bias=True)
      (2): Tanh()
    )

    Args:
        name: One of `names()`.
        shape: The shape of one input, `(context,)` for text.
        classes: How many answers there are.
        seed: Decides the start.
        chosen: Options of the network.
    """
    made = {**_BUILT_IN, **_own}.get(name)
    if made is None:
        close = difflib.get_close_matches(str(name), names(), 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"there is no network {name!r}; there are: {', '.join(names())}.{hint}")
    for size in shape:
        at_least_one(shape=size)
    at_least_one(classes=classes)
    options = inspect.signature(made)
    try:
        options.bind(shape, classes, **chosen)
    except TypeError as error:
        raise ValueError(f"the network {name!r} does not take {chosen}: {error}; it is called as {options}") from error
    with forked_rng(torch.Generator().manual_seed(seed ^ _SALT)):
        model = made(tuple(shape), classes, **chosen)
    if not isinstance(model, nn.Module):
        raise TypeError(f"the builder of the network {name!r} must return a Module, not {type(model).__name__}")
    return model


def register(name: str) -> Callable[[B], B]:
    """Add your own network under a name: a module class or function that takes `(shape, classes, **options)`.

    The last registration of a name counts, so that a file may be read again; the built-in names stay what they are.

    >>> @register("linear")
    ... def linear(shape, classes, *, bias=True):
    ...     return nn.Linear(*shape, classes, bias=bias)
    >>> network("linear", shape=(4,), classes=2, seed=0, bias=False)
    Linear(in_features=4, out_features=2, bias=False)
    >>> _ = _own.pop("linear")

    Args:
        name: What settings call it.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f'register() takes the name of the network, as in @register("mine"), not {name!r}')
    if name in _BUILT_IN:
        raise ValueError(f"the network {name!r} is built in: register yours under another name")

    def keep(builder: B) -> B:
        _own[name] = builder
        return builder

    return keep


def names() -> tuple[str, ...]:
    """Every network that there is, the built-in ones first."""
    return (*_BUILT_IN, *_own)
