"""What the networks are asked for, checked before anything is built: shapes, counts and the names of activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from torch import nn

ACTIVATIONS: Final[Mapping[str, type[nn.Module]]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
}


def image(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The shape as (channels, height, width), or an error.

    >>> image((3, 16, 16))
    (3, 16, 16)
    >>> image((784,))
    Traceback (most recent call last):
    ValueError: shape=(784,) must be (channels, height, width) for a network that looks at images
    """
    if len(shape) != 3 or min(shape) < 1:
        raise ValueError(f"shape={shape} must be (channels, height, width) for a network that looks at images")
    channels, height, width = shape
    return channels, height, width


def context(shape: tuple[int, ...]) -> int:
    """The longest sequence of tokens that a language model of this shape reads.

    >>> context((32,))
    32
    >>> context((3, 16, 16))
    Traceback (most recent call last):
    ValueError: shape=(3, 16, 16) must be (context,) for a network that reads tokens
    """
    if len(shape) != 1 or shape[0] < 1:
        raise ValueError(f"shape={shape} must be (context,) for a network that reads tokens")
    return shape[0]


def at_least_one(**sizes: int) -> None:
    """An error that names the first size that is not a positive whole number.

    >>> at_least_one(width=8, layers=0)
    Traceback (most recent call last):
    ValueError: layers=0 must be a whole number of at least 1
    """
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name}={size!r} must be a whole number of at least 1")


def whole_heads(width: int, heads: int) -> None:
    """An error unless the width splits evenly over the attention heads.

    >>> whole_heads(48, 5)
    Traceback (most recent call last):
    ValueError: width=48 must be a multiple of heads=5
    """
    at_least_one(width=width, heads=heads)
    if width % heads:
        raise ValueError(f"width={width} must be a multiple of heads={heads}")


def activation(name: str) -> type[nn.Module]:
    """The class of an activation.

    >>> activation("gelu")()
    GELU(approximate='none')
    >>> activation("relo")
    Traceback (most recent call last):
    ValueError: activation='relo' must be one of relu, leaky_relu, elu, gelu, silu, tanh, sigmoid
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"activation={name!r} must be one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
