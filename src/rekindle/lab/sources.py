"""Where a run's numbers come from: seeds, the examples or text that a task trains on, and streams of tasks.

Every random number comes from the run's seed and a name for what is drawn. Runs of one seed draw the same data, the
same order and the same first weights whatever remedy they test, because each kind of draw has its own generator, which
no other kind advances. `Examples` and `Text` are read in batches; a `Stream` is a sequence of tasks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")


def derive(seed: int, *names: str | int) -> int:
    """A seed for one kind of draw, 63 bits that share nothing with those of another name."""
    text = "/".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *names: str | int) -> torch.Generator:
    """A new generator for one kind of draw."""
    return torch.Generator().manual_seed(derive(seed, *names))


def isolated(items: Iterator[Item], seed: int) -> Iterator[Item]:
    """The same items, made while torch's global generator holds a state of their own (dropout draws from it).

    The consumer of the items finds the global generator as it was.
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


Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs x (N, …) with labels y (N,).

    >>> data = Examples(torch.arange(6.0)[:, None], torch.arange(6))
    >>> [len(y) for _, y in data.batches(4, torch.Generator().manual_seed(0))]
    [4, 2]
    """

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def steps(self, size: int) -> int:
        """How many batches one pass has."""
        whole, rest = divmod(len(self), size)
        return whole + (rest > 1 or (rest == 1 and whole == 0))

    def batches(self, size: int, generator: torch.Generator) -> Iterator[Batch]:
        """One pass in random order; a last batch of one example is left out, for BatchNorm cannot learn from it."""
        order = torch.randperm(len(self), generator=generator)
        for index in torch.split(order[: self.steps(size) * size], size):
            yield self.x.index_select(0, index), self.y.index_select(0, index)

    def some(self, count: int) -> Examples:
        """At most `count` examples, evenly spaced, so that data sorted by class lose none of them."""
        if len(self) <= count:
            return self
        index = torch.arange(count) * len(self) // count
        return Examples(self.x[index], self.y[index])

    def part(self, share: float, generator: torch.Generator) -> Examples:
        """A random share, at least one example."""
        index = torch.randperm(len(self), generator=generator)[: max(1, round(share * len(self)))]
        return Examples(self.x[index], self.y[index])

    def joined(self, *others: Examples) -> Examples:
        """These and others, one after the other."""
        return Examples(torch.cat([self.x, *(o.x for o in others)]), torch.cat([self.y, *(o.y for o in others)]))


@dataclass(frozen=True, eq=False)
class Text:
    """Tokens (N,), read in windows of `context` tokens; the label of a token is the one after it.

    >>> text = Text(torch.arange(10), context=4)
    >>> x, y = next(text.batches(2, torch.Generator().manual_seed(0)))
    >>> x.shape, torch.equal(y, x + 1)
    (torch.Size([2, 4]), True)
    """

    tokens: Tensor
    context: int

    def __post_init__(self) -> None:
        if len(self.tokens) <= self.context:
            raise ValueError(f"a text of {len(self.tokens)} tokens holds no window of {self.context} and one more")

    def __len__(self) -> int:
        """How many windows there are side by side."""
        return (len(self.tokens) - 1) // self.context

    def steps(self, size: int) -> int:
        """How many batches hold as many tokens as the text has."""
        return max(1, len(self) // size)

    def batches(self, size: int, generator: torch.Generator) -> Iterator[Batch]:
        """Windows at random places, as many as make one pass through the text."""
        reach = torch.arange(self.context + 1)
        for _ in range(self.steps(size)):
            start = torch.randint(len(self.tokens) - self.context, (size, 1), generator=generator)
            window = self.tokens[start + reach]
            yield window[:, :-1], window[:, 1:]

    def some(self, count: int) -> Examples:
        """At most `count` windows, evenly spaced."""
        count = min(count, len(self))
        start = torch.arange(count) * len(self) // count * self.context
        window = self.tokens[start[:, None] + torch.arange(self.context + 1)]
        return Examples(window[:, :-1], window[:, 1:])

    def part(self, share: float, generator: torch.Generator) -> Text:
        """A stretch that holds this share of the text, at a random place."""
        length = min(len(self.tokens), max(self.context + 1, round(share * len(self.tokens))))
        start = int(torch.randint(len(self.tokens) - length + 1, (), generator=generator))
        return Text(self.tokens[start : start + length], self.context)

    def joined(self, *others: Text) -> Text:
        """These and others, one after the other."""
        return Text(torch.cat([self.tokens, *(o.tokens for o in others)]), self.context)


Source = Examples | Text


@dataclass(frozen=True, eq=False)
class Task:
    """Something to learn, and for how long: so many epochs, or so many steps.

    >>> data = Examples(torch.zeros(10, 1), torch.zeros(10, dtype=torch.long))
    >>> Task("zeros", data, epochs=3).length(4)
    9
    >>> Task("zeros", data, epochs=3, steps=5)
    Traceback (most recent call last):
    ...
    ValueError: task 'zeros' needs exactly one of epochs=3 and steps=5
    """

    name: str
    train: Source
    test: Source | None = None
    epochs: int | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(f"task {self.name!r} needs exactly one of epochs={self.epochs} and steps={self.steps}")

    def length(self, size: int) -> int:
        """How many steps the task takes with batches of this size."""
        return self.steps if self.steps is not None else (self.epochs or 0) * self.train.steps(size)

    def batches(self, size: int, generator: torch.Generator) -> Iterator[Batch]:
        """Exactly `length(size)` batches, pass after pass."""
        left = self.length(size)
        while left > 0:
            for batch in self.train.batches(size, generator):
                yield batch
                left -= 1
                if left == 0:
                    return

    def judged_on(self, count: int) -> Examples:
        """At most `count` rows of the test set, or of the training set where there is no other."""
        return (self.train if self.test is None else self.test).some(count)


@dataclass(frozen=True, eq=False)
class Stream:
    """A sequence of tasks, each made when needed and the same every time.

    `shape` is that of one input and `classes` the number of answers; for text the context and the vocabulary.

    >>> data = Examples(torch.zeros(4, 1), torch.zeros(4, dtype=torch.long))
    >>> stream = Stream("same", 2, (1,), 3, lambda i: Task(f"task {i}", data, epochs=1))
    >>> len(stream), [task.name for task in stream]
    (3, ['task 0', 'task 1', 'task 2'])
    """

    name: str
    classes: int
    shape: tuple[int, ...]
    length: int
    make: Callable[[int], Task]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < self.length:
            raise IndexError(f"stream {self.name!r} has {self.length} tasks, there is no task {index}")
        return self.make(index)

    def __iter__(self) -> Iterator[Task]:
        return (self[index] for index in range(self.length))


def replay(stream: Stream, share: float, *, seed: int = 0) -> Stream:
    """The stream with a share of every earlier task's training data in each task, under its old labels and permutation.

    >>> data = [Examples(torch.full((10, 1), float(i)), torch.full((10,), i)) for i in range(3)]
    >>> stream = Stream("numbers", 3, (1,), 3, lambda i: Task(str(i), data[i], epochs=1))
    >>> torch.bincount(replay(stream, 0.2)[2].train.y).tolist()
    [2, 2, 10]
    """
    if not 0 <= share <= 1:
        raise ValueError(f"replay share={share} must lie between 0 (no old data) and 1 (all of it)")
    if share == 0:
        return stream

    def make(index: int) -> Task:
        task = stream[index]
        old = [stream[i].train.part(share, generator(seed, "replay", index, i)) for i in range(index)]
        return replace(task, train=task.train.joined(*old)) if old else task  # type: ignore[arg-type]

    return replace(stream, make=make)
