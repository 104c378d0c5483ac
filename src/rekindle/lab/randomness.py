"""Where every random number of a run comes from: the run's seed and a name for what is drawn.

Runs of one seed draw the same data, the same order and the same first weights whatever remedy they test, because each
kind of draw has a generator of its own that no other kind can advance.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TypeVar

import torch

Item = TypeVar("Item")


def derive(seed: int, *names: str | int) -> int:
    """A seed for one kind of draw, 63 bits that share nothing with those of another name.

    >>> derive(0, "order", 1) == derive(0, "order", 1), derive(0, "order", 1) == derive(0, "order", 2)
    (True, False)
    """
    text = "/".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *names: str | int) -> torch.Generator:
    """A new generator for one kind of draw.

    >>> torch.equal(torch.rand(2, generator=generator(0, "a")), torch.rand(2, generator=generator(0, "a")))
    True
    """
    return torch.Generator().manual_seed(derive(seed, *names))


def isolated(items: Iterator[Item], seed: int) -> Iterator[Item]:
    """The same items, made while torch's global generator holds a state of their own (dropout draws from it).

    Whoever takes the items finds the global generator as it was.

    >>> before = torch.get_rng_state()
    >>> numbers = [n.item() for n in isolated((torch.rand(()) for _ in range(2)), seed=1)]
    >>> torch.equal(before, torch.get_rng_state()), numbers[0] != numbers[1]
    (True, True)
    """
    state = torch.Generator().manual_seed(seed).get_state()
    while True:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            try:
                item = next(items)
            except StopIteration:
                return
            state = torch.get_rng_state()
        yield item
