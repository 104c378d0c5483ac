"""How a message names an argument: as Python has it, or as an option while a command of ours runs.

    raise ValueError(f"nothing is left: {argument('targets', targets)}")

The library knows no command line: a command says by `options` that arguments are options, and what it calls advice that
is no single argument.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_ABSENT = object()
_OPTIONS: ContextVar[Mapping[str, str] | None] = ContextVar("options", default=None)


def argument(name: str, value: Any = _ABSENT) -> str:
    """An argument, or one with its value.

    >>> argument("heads"), argument("scale", "norm")
    ('heads=', "scale='norm'")
    >>> with options({}):
    ...     argument("split_heads"), argument("include", ("mlp", "0.*"))
    ('--split-heads', '--include mlp --include 0.*')
    """
    if _OPTIONS.get() is None:
        return f"{name}=" if value is _ABSENT else f"{name}={value!r}"
    option = f"--{name.replace('_', '-')}"
    if value is _ABSENT:
        return option
    return " ".join(f"{option} {each}" for each in (value if isinstance(value, list | tuple) else [value]))


def advice(key: str, words: str) -> str:
    """What to do, in the words of the command that runs if it has its own for this key.

    >>> with options({"earlier": "give --reference"}):
    ...     advice("earlier", "pass reference="), advice("later", "train on")
    ('give --reference', 'train on')
    """
    return (_OPTIONS.get() or {}).get(key, words)


@contextmanager
def options(words: Mapping[str, str]) -> Iterator[None]:
    """Inside, arguments are options, and advice of these keys has these words."""
    token = _OPTIONS.set(words)
    try:
        yield
    finally:
        _OPTIONS.reset(token)
