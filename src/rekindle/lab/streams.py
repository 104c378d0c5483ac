"""Streams of tasks from any labeled data set or text: what makes a network lose its plasticity.

Each builder takes the data and a seed, and gives a `Stream` whose tasks are made when needed. `STREAMS` holds the same
builders by name, with the data named too; `register` adds your own.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from rekindle.lab.data import Images, load
from rekindle.lab.sources import Examples, Stream, Task, Text, generator

Builder = Callable[..., Stream]
B = TypeVar("B", bound=Builder)


def warm_start(data: Images, *, share: float = 0.1, first_epochs: int, epochs: int, seed: int) -> Stream:
    """A share of the data for many epochs, then all of it (Ash & Adams, 2020).

    >>> [len(task.train) for task in warm_start(load("digits"), share=0.5, first_epochs=2, epochs=1, seed=0)]
    [718, 1437]
    """
    if not 0 < share < 1:
        raise ValueError(f"share={share} must lie between 0 and 1: it is the part that is there at the start")
    order = torch.randperm(len(data.y), generator=generator(seed, "order of arrival"))
    whole, test = Examples(data.x[order], data.y[order]), Examples(data.test_x, data.test_y)
    first = max(1, round(share * len(order)))

    def make(index: int) -> Task:
        if index == 0:
            return Task(f"{share:.0%}", Examples(whole.x[:first], whole.y[:first]), test, epochs=first_epochs)
        return Task("100%", whole, test, epochs=epochs)

    return _of(data, "warm-start", 2, make)


def continual(data: Images, *, chunks: int = 10, epochs: int, cumulative: bool = True, seed: int) -> Stream:
    """The data in equal chunks that arrive one after the other; what has arrived stays if `cumulative`.

    >>> [len(task.train) for task in continual(load("digits"), chunks=3, epochs=1, seed=0)]
    [479, 958, 1437]
    """
    order = torch.randperm(len(data.y), generator=generator(seed, "order of arrival"))
    test = Examples(data.test_x, data.test_y)
    edges = [round(i * len(order) / chunks) for i in range(chunks + 1)]

    def make(index: int) -> Task:
        rows = order[0 if cumulative else edges[index] : edges[index + 1]]
        return Task(f"chunk {index + 1}", Examples(data.x[rows], data.y[rows]), test, epochs=epochs)

    return _of(data, "continual", chunks, make)


def class_incremental(
    data: Images,
    *,
    phases: int | None = None,
    epochs: int,
    per_class: int | None = None,
    cumulative: bool = True,
    seed: int,
) -> Stream:
    """New classes in each phase, in an order of their own for each seed; old ones stay if `cumulative`.

    The test set of a phase holds the classes that its training set holds. `phases` is one for each class unless
    given, `per_class` the number of training images per class.

    >>> phase = class_incremental(load("digits"), per_class=20, epochs=1, seed=0)[2]
    >>> len(phase.train), len(phase.train.y.unique())
    (60, 3)
    """
    count = data.classes if phases is None else phases
    if not 1 <= count <= data.classes:
        raise ValueError(f"phases={phases}: {data.name!r} has {data.classes} classes to share among them")
    order = torch.randperm(data.classes, generator=generator(seed, "order of classes"))
    edges = [round(i * data.classes / count) for i in range(count + 1)]

    def make(index: int) -> Task:
        classes = order[0 if cumulative else edges[index] : edges[index + 1]]
        kept = torch.cat([(data.y == c).nonzero().flatten()[:per_class] for c in classes])
        tested = torch.isin(data.test_y, classes).nonzero().flatten()
        return Task(
            f"{len(classes)} classes",
            Examples(data.x[kept], data.y[kept]),
            Examples(data.test_x[tested], data.test_y[tested]),
            epochs=epochs,
        )

    return _of(data, "class-incremental", count, make)


def permuted_inputs(data: Images, *, tasks: int, epochs: int, seed: int) -> Stream:
    """The true labels, and a new order of the pixels in every task (the channels of a pixel stay together)."""
    pixels = data.x[0, 0].numel()

    def make(index: int) -> Task:
        order = torch.randperm(pixels, generator=generator(seed, "pixels", index))

        def permuted(x: Tensor) -> Tensor:
            return x.flatten(2).index_select(2, order).view_as(x)

        train, test = Examples(permuted(data.x), data.y), Examples(permuted(data.test_x), data.test_y)
        return Task(f"permutation {index + 1}", train, test, epochs=epochs)

    return _of(data, "permuted-inputs", tasks, make)


def random_labels(data: Images, *, tasks: int, epochs: int, per_task: int | None = None, seed: int) -> Stream:
    """New labels at random in every task: equally hard tasks, learned by heart, so that only plasticity can change.

    With `per_task` every task also has so many images of its own, until all have been used.

    >>> stream = random_labels(load("digits"), tasks=2, epochs=1, seed=0)
    >>> torch.equal(stream[0].train.y, stream[1].train.y), torch.equal(stream[1].train.y, stream[1].train.y)
    (False, True)
    """

    def make(index: int) -> Task:
        first = (index * each) % len(data.x)
        x = data.x[first : first + each]
        y = torch.randint(data.classes, (each,), generator=generator(seed, "labels", index))
        return Task(f"labels {index + 1}", Examples(x, y), None, epochs=epochs)

    each = len(data.x) if per_task is None else per_task
    if each < 1 or len(data.x) % each:
        raise ValueError(f"per_task={per_task} must divide the {len(data.x)} images (count=)")
    return _of(data, "random-labels", tasks, make)


def label_shift(
    data: Images, *, tasks: int, epochs: int, per_task: int | None = None, concentration: float = 0.3, seed: int
) -> Stream:
    """How frequent the classes are changes from task to task; what each looks like does not.

    Each task draws its shares from a symmetric Dirichlet distribution (small `concentration`: few classes have most)
    and then `per_task` images, with repetition where a class has too few; its test set has the same shares.

    >>> task = label_shift(load("digits"), tasks=2, epochs=1, per_task=100, seed=0)[1]
    >>> len(task.train), bool(torch.bincount(task.train.y, minlength=10).max() > 20)
    (100, True)
    """
    if concentration <= 0:
        raise ValueError(f"concentration={concentration} must be positive")

    def make(index: int) -> Task:
        draws = generator(seed, "shares", index)
        shares = torch._sample_dirichlet(torch.full((data.classes,), concentration, dtype=torch.double), draws)

        def shifted(x: Tensor, y: Tensor, size: int) -> Examples:
            chance = shares[y] / torch.bincount(y, minlength=data.classes)[y]
            rows = torch.multinomial(chance + 1e-12, size, replacement=True, generator=draws)
            return Examples(x[rows], y[rows])

        train = shifted(data.x, data.y, per_task or len(data.y))
        return Task(f"shares {index + 1}", train, shifted(data.test_x, data.test_y, len(data.test_y)), epochs=epochs)

    return _of(data, "label-shift", tasks, make)


def drift(sets: Sequence[Images], *, tasks: int, epochs: int, per_task: int | None = None, seed: int) -> Stream:
    """From one data set to the next and back again; each visit draws `per_task` images anew."""
    first = sets[0]
    for other in sets[1:]:
        if other.x.shape[1:] != first.x.shape[1:] or other.classes != first.classes:
            raise ValueError(
                f"{first.name!r} has {tuple(first.x.shape[1:])} images of {first.classes} classes, {other.name!r} "
                f"{tuple(other.x.shape[1:])} of {other.classes}: one network cannot learn both (resize with size=)"
            )

    def make(index: int) -> Task:
        data = sets[index % len(sets)]
        whole = Examples(data.x, data.y)
        train = whole.part((per_task or len(whole)) / len(whole), generator(seed, "visit", index))
        return Task(f"{data.name} {index // len(sets) + 1}", train, Examples(data.test_x, data.test_y), epochs=epochs)

    return _of(first, "drift", tasks, make)


def permuted_alphabet(tokens: Tensor, *, vocabulary: int, context: int, tasks: int, steps: int, seed: int) -> Stream:
    """The same text in a new alphabet in every task; the last tenth is for testing.

    >>> stream = permuted_alphabet(torch.arange(100) % 7, vocabulary=7, context=4, tasks=2, steps=1, seed=0)
    >>> len(stream[0].train.tokens), stream.shape, stream.classes
    (90, (4,), 7)
    """

    def make(index: int) -> Task:
        alphabet = torch.randperm(vocabulary, generator=generator(seed, "alphabet", index))
        return _reading(f"alphabet {index + 1}", alphabet[tokens], context, steps)

    return Stream("alphabet", vocabulary, (context,), tasks, make)


def domains(
    texts: Mapping[str, Tensor], *, vocabulary: int, context: int, steps: int, rounds: int = 1, seed: int = 0
) -> Stream:
    """One kind of text after the other, in the given order, `rounds` times; the last tenth of each is for testing.

    The tasks draw nothing, so the seed changes nothing here; it decides the windows that a run reads.

    >>> texts = {"ones": torch.ones(50, dtype=torch.long), "twos": torch.full((50,), 2)}
    >>> [task.name for task in domains(texts, vocabulary=3, context=4, steps=1)]
    ['ones', 'twos']
    """
    names = list(texts)

    def make(index: int) -> Task:
        return _reading(names[index % len(names)], texts[names[index % len(names)]], context, steps)

    return Stream("domains", vocabulary, (context,), rounds * len(names), make)


def reconstruction(x: Tensor, *, tasks: int, steps: int, centered: bool = False) -> Stream:
    """The inputs are the answers, for autoencoders; every sixth row is for testing. `centered`: less their mean."""
    x = x - x.flatten(0, -2).mean(0) if centered else x
    test = torch.arange(len(x)) % 6 == 5
    train, judged = (Examples(rows, rows) for rows in (x[~test], x[test]))
    shape = tuple(x.shape[1:])
    return Stream("reconstruction", 1, shape, tasks, lambda i: Task(f"part {i + 1}", train, judged, steps=steps))


def _reading(name: str, tokens: Tensor, context: int, steps: int) -> Task:
    edge = len(tokens) * 9 // 10
    return Task(name, Text(tokens[:edge], context), Text(tokens[edge:], context), steps=steps)


def _of(data: Images, name: str, tasks: int, make: Callable[[int], Task]) -> Stream:
    if tasks < 1:
        raise ValueError(f"the stream {name!r} needs at least one task, not {tasks}")
    return Stream(name, data.classes, tuple(data.x.shape[1:]), tasks, make)


def _images(builder: Builder) -> Builder:
    """A builder that takes the name of its data set, or several, with the options of `rekindle.lab.data.load`."""

    def named(seed: int, *, data: str | Sequence[str] = "digits", **options: Any) -> Stream:
        loading = {key: options.pop(key) for key in ("size", "count", "test_count") if key in options}
        sets = [load(name, seed=seed, **loading) for name in ([data] if isinstance(data, str) else data)]
        return builder(sets if builder is drift else sets[0], seed=seed, **options)

    return named


def _alphabet(seed: int, *, data: str = "shakespeare", length: int | None = None, **options: Any) -> Stream:
    from rekindle.lab.data.text import character_tokenizer, corpus

    text = corpus(data)[:length]
    tokenizer = character_tokenizer(text)
    return permuted_alphabet(tokenizer.encode(text), vocabulary=tokenizer.size, seed=seed, **options)


def _domains(
    seed: int,
    *,
    data: Sequence[str] = ("shakespeare", "python", "bible"),
    tokens: str | int = "byte",
    length: int | None = None,
    **options: Any,
) -> Stream:
    """`tokens`: "byte", "character" (over the union of all texts) or the size of a BPE vocabulary trained on it."""
    from rekindle.lab.data import text as reading

    texts = {name: reading.corpus(name)[:length] for name in data}
    if tokens == "byte":
        tokenizer: reading.Tokenizer = reading.byte_tokenizer()
    elif tokens == "character":
        tokenizer = reading.character_tokenizer("".join(texts.values()))
    elif isinstance(tokens, int):
        tokenizer = reading.bpe_tokenizer("".join(texts.values()), tokens)
    else:
        raise ValueError(f'tokens={tokens!r} is neither "byte", "character" nor the size of a vocabulary')
    encoded = {name: tokenizer.encode(each) for name, each in texts.items()}
    return domains(encoded, vocabulary=tokenizer.size, seed=seed, **options)


def _reconstruction(seed: int, *, data: str = "minilm", count: int = 1536, **options: Any) -> Stream:
    """`data`: "minilm", hidden states of its 384 units on 32 tokens of the Bible, or the name of a set of images."""
    if data == "minilm":
        from rekindle.lab.data.activations import minilm

        return reconstruction(minilm(passages=count), **options)
    return reconstruction(load(data, seed=seed, count=count).x, **options)


STREAMS: dict[str, Builder] = {
    "warm-start": _images(warm_start),
    "continual": _images(continual),
    "class-incremental": _images(class_incremental),
    "permuted-inputs": _images(permuted_inputs),
    "random-labels": _images(random_labels),
    "label-shift": _images(label_shift),
    "drift": _images(drift),
    "alphabet": _alphabet,
    "domains": _domains,
    "reconstruction": _reconstruction,
}
_BUILT_IN = frozenset(STREAMS)


def register(name: str) -> Callable[[B], B]:
    """Add your own stream: a function `builder(seed, **options) -> Stream`; seeds stay below 2³¹.

    >>> @register("zeros")
    ... def zeros(seed, *, rows=4):
    ...     data = Examples(torch.zeros(rows, 1), torch.zeros(rows, dtype=torch.long))
    ...     return Stream("zeros", 2, (1,), 1, lambda index: Task("zeros", data, epochs=1))
    >>> len(stream("zeros", 0, rows=5)[0].train)
    5
    """

    def keep(builder: B) -> B:
        STREAMS[name] = builder
        return builder

    return keep


def stream(name: str, seed: int, **options: object) -> Stream:
    """The stream of this name.

    >>> stream("random-lables", 0)
    Traceback (most recent call last):
    ...
    ValueError: there is no stream 'random-lables'; did you mean 'random-labels'?
    """
    if name not in STREAMS:
        close = difflib.get_close_matches(name, STREAMS, 1)
        known = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(STREAMS)}"
        raise ValueError(f"there is no stream {name!r}; {known}")
    # User builders pass their seed to numpy, random or manual_seed, some of which take only 31 bits.
    return STREAMS[name](seed if name in _BUILT_IN else seed % 2**31, **options)
