"""Marking weights as output layers: those that the user names, or that evidence shows."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import replace

from rekindle.blocks.entries import Found
from rekindle.spelling import argument


def named_heads(found: list[Found], heads: Iterable[str] | str) -> set[str]:
    """The names of the weights that these globs (of parameter or module names) mark as heads; no match is an error."""
    globs = [heads] if isinstance(heads, str) else list(heads)
    for glob in globs:
        if not any(_named(f, glob) for f in found if f.blocks):
            names = ", ".join(f.name for f in found if f.blocks)
            raise ValueError(f"{argument('heads', glob)} names no weight with matrices; there are: {names}")
    return {f.name for f in found if any(_named(f, glob) for glob in globs)}


def mark_heads(found: list[Found], heads: set[str], reason: str = "output head") -> list[Found]:
    """The same list with these weights marked as heads; a tied embedding keeps its role."""
    marked = []
    for f in found:
        if f.name in heads and f.blocks:
            does = f.role if f.role == "embedding" else "head"
            blocks = f.blocks if does == "embedding" else tuple(replace(b, role="head") for b in f.blocks)
            why = "embedding, tied to the output head" if does == "embedding" else reason
            f = replace(f, role=does, blocks=blocks, marks={"head": why, **f.marks})
        marked.append(f)
    return marked


def _named(found: Found, glob: str) -> bool:
    names = (found.name, found.module, found.key, *found.also)
    return any(fnmatch.fnmatchcase(name, glob) for name in names)
