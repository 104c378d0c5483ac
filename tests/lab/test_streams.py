"""Streams: what each task holds, that a seed decides all of it, and that batches leave nothing out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rekindle.lab import streams
from rekindle.lab.data import Images
from rekindle.lab.sources import Examples, Stream, Task, Text, replay


def images(count: int = 60, classes: int = 5, size: int = 4, channels: int = 2, name: str = "made") -> Images:
    draws = torch.Generator().manual_seed(3)
    x = torch.randn(count + 20, channels, size, size, generator=draws)
    y = torch.arange(count + 20) % classes
    return Images(name, x[:count], y[:count], x[count:], y[count:], classes)


BUILDERS: dict[str, Any] = {
    "warm_start": lambda seed: streams.warm_start(images(), share=0.2, first_epochs=3, epochs=2, seed=seed),
    "continual": lambda seed: streams.continual(images(), chunks=3, epochs=2, seed=seed),
    "class_incremental": lambda seed: streams.class_incremental(images(), epochs=2, per_class=6, seed=seed),
    "permuted_inputs": lambda seed: streams.permuted_inputs(images(), tasks=3, epochs=2, seed=seed),
    "random_labels": lambda seed: streams.random_labels(images(), tasks=3, epochs=2, seed=seed),
    "label_shift": lambda seed: streams.label_shift(images(), tasks=3, epochs=2, per_task=40, seed=seed),
    "drift": lambda seed: streams.drift([images(), images(name="other")], tasks=4, epochs=2, per_task=9, seed=seed),
}


def train(task: Task) -> Examples:
    assert isinstance(task.train, Examples)
    return task.train


@pytest.mark.parametrize("name", BUILDERS)
def test_a_seed_decides_every_task(name: str) -> None:
    one, again, other = BUILDERS[name](1), BUILDERS[name](1), BUILDERS[name](2)
    # Asked in another order, tasks are the same: nothing is drawn from a shared generator.
    for index in reversed(range(len(one))):
        assert torch.equal(train(one[index]).x, train(again[index]).x)
        assert torch.equal(train(one[index]).y, train(again[index]).y)
    assert any(
        train(a).x.shape != train(b).x.shape
        or not torch.equal(train(a).x, train(b).x)
        or not torch.equal(train(a).y, train(b).y)
        for a, b in zip(one, other, strict=True)
    )
    assert one.shape == (2, 4, 4) and one.classes == 5


@pytest.mark.parametrize("name", BUILDERS)
def test_no_global_random_number_is_drawn(name: str) -> None:
    before = torch.get_rng_state()
    for task in BUILDERS[name](0):
        list(task.batches(7, torch.Generator().manual_seed(0)))
    assert torch.equal(before, torch.get_rng_state())


def test_warm_start_holds_the_first_part_again() -> None:
    small, whole = BUILDERS["warm_start"](0)
    assert len(small.train) == 12 and len(whole.train) == 60
    assert torch.equal(train(small).x, train(whole).x[:12])
    assert (small.epochs, whole.epochs) == (3, 2)
    assert sorted(train(whole).x.sum((1, 2, 3)).tolist()) == sorted(images().x.sum((1, 2, 3)).tolist())


def test_continual_chunks_grow_or_follow_each_other() -> None:
    assert [len(task.train) for task in BUILDERS["continual"](0)] == [20, 40, 60]
    apart = streams.continual(images(), chunks=3, epochs=1, cumulative=False, seed=0)
    rows = torch.cat([train(task).x for task in apart])
    assert len(rows) == 60 and len(rows.unique(dim=0)) == 60


def test_classes_arrive_one_by_one_and_are_tested_so() -> None:
    stream = BUILDERS["class_incremental"](0)
    seen: set[int] = set()
    for task in stream:
        classes = set(train(task).y.tolist())
        assert seen < classes and len(classes) == len(seen) + 1
        assert isinstance(task.test, Examples) and set(task.test.y.tolist()) == classes
        assert torch.bincount(train(task).y).unique().tolist() in ([6], [0, 6])
        seen = classes
    alone = streams.class_incremental(images(), phases=2, epochs=1, cumulative=False, seed=0)
    assert [len(train(task).y.unique()) for task in alone] in ([2, 3], [3, 2])


def test_permuted_inputs_move_pixels_and_keep_channels_together() -> None:
    data, stream = images(), BUILDERS["permuted_inputs"](0)
    task = stream[1]
    old, new = data.x.flatten(2), train(task).x.flatten(2)
    # Each new pixel is one old pixel in every image and both channels.
    places = [(old == new[:, :, p : p + 1]).all(0).all(0).nonzero().flatten().tolist() for p in range(16)]
    assert sorted(p for place in places for p in place) == list(range(16))
    assert isinstance(task.test, Examples)
    order = torch.tensor([place[0] for place in places])
    assert torch.equal(task.test.x.flatten(2), data.test_x.flatten(2)[:, :, order])
    assert torch.equal(train(task).y, data.y)


def test_random_labels_have_no_test_and_are_uniform() -> None:
    stream = streams.random_labels(images(count=5000), tasks=2, epochs=1, seed=0)
    counts = torch.bincount(train(stream[1]).y, minlength=5)
    assert stream[0].test is None and counts.min() > 900
    assert torch.equal(train(stream[0]).x, train(stream[1]).x)


def test_label_shift_changes_shares_alike_in_training_and_test() -> None:
    data = images(count=4000)
    big = Images("big", data.x, data.y, data.x, data.y, 5)
    stream = streams.label_shift(big, tasks=2, epochs=1, per_task=4000, seed=0)
    first, second = (torch.bincount(train(task).y, minlength=5) / 4000 for task in stream)
    assert (first - second).abs().max() > 0.1
    task = stream[0]
    assert isinstance(task.test, Examples)
    # Two samples of 4,000 differ in a share by about √(2·p(1 − p)/4000) ≤ .011.
    assert (torch.bincount(task.test.y, minlength=5) / 4000 - first).abs().max() < 0.05


def test_drift_alternates_and_refuses_other_shapes() -> None:
    assert [task.name for task in BUILDERS["drift"](0)] == ["made 1", "other 1", "made 2", "other 2"]
    assert not torch.equal(train(BUILDERS["drift"](0)[0]).x, train(BUILDERS["drift"](0)[2]).x)
    with pytest.raises(ValueError, match="one network cannot learn both"):
        streams.drift([images(), images(size=6, name="large")], tasks=2, epochs=1, seed=0)


def test_an_alphabet_is_a_renaming_of_the_text() -> None:
    tokens = torch.randint(7, (400,), generator=torch.Generator().manual_seed(0))
    stream = streams.permuted_alphabet(tokens, vocabulary=7, context=5, tasks=3, steps=4, seed=0)
    new = [torch.cat([task.train.tokens, task.test.tokens]) for task in stream]
    for text in new:
        pairs = {(int(a), int(b)) for a, b in zip(tokens, text, strict=True)}
        assert len(pairs) == 7 and len({b for _, b in pairs}) == 7
    assert not torch.equal(new[0], new[1])
    assert stream[0].length(8) == 4


def test_domains_follow_in_rounds() -> None:
    texts = {"a": torch.zeros(50, dtype=torch.long), "b": torch.ones(50, dtype=torch.long)}
    stream = streams.domains(texts, vocabulary=2, context=4, steps=2, rounds=2)
    assert [task.name for task in stream] == ["a", "b", "a", "b"]
    assert int(stream[3].train.tokens.sum()) == 45


def test_a_pass_hands_out_every_example_once() -> None:
    data = Examples(torch.arange(23.0)[:, None], torch.arange(23))
    seen = [y for _, y in data.batches(5, torch.Generator().manual_seed(0))]
    assert sorted(torch.cat(seen).tolist()) == list(range(23)) and len(seen) == data.steps(5) == 5
    assert all(torch.equal(x[:, 0], y.float()) for x, y in data.batches(5, torch.Generator().manual_seed(1)))


@pytest.mark.parametrize(("count", "size", "sizes"), [(11, 5, [5, 5]), (1, 5, [1]), (12, 5, [5, 5, 2]), (2, 1, [1, 1])])
def test_a_lone_last_example_is_left_out(count: int, size: int, sizes: list[int]) -> None:
    data = Examples(torch.zeros(count, 1), torch.zeros(count, dtype=torch.long))
    assert [len(y) for _, y in data.batches(size, torch.Generator())] == sizes
    assert data.steps(size) == len(sizes)


def test_windows_are_the_text_and_its_next_token() -> None:
    text = Text(torch.arange(100), context=6)
    for x, y in text.batches(3, torch.Generator().manual_seed(0)):
        assert x.shape == (3, 6) and torch.equal(y, x + 1)
        assert torch.equal(x, x[:, :1] + torch.arange(6))
    some = text.some(4)
    assert some.x.shape == (4, 6) and len(some.x[:, 0].unique()) == 4
    with pytest.raises(ValueError, match="holds no window"):
        Text(torch.arange(5), context=5)


def test_an_evaluation_keeps_every_class_of_sorted_data() -> None:
    data = Examples(torch.zeros(1000, 1), torch.arange(1000) // 100)
    assert torch.bincount(data.some(50).y).tolist() == [5] * 10


@pytest.mark.parametrize(("epochs", "steps", "length"), [(3, None, 9), (None, 7, 7), (None, 2, 2)])
def test_a_task_hands_out_as_many_batches_as_it_says(epochs: int | None, steps: int | None, length: int) -> None:
    task = Task("t", Examples(torch.zeros(10, 1), torch.zeros(10, dtype=torch.long)), epochs=epochs, steps=steps)
    assert task.length(4) == length == len(list(task.batches(4, torch.Generator())))


def test_replay_keeps_old_labels() -> None:
    stream = streams.random_labels(images(count=100), tasks=3, epochs=1, seed=0)
    mixed = replay(stream, 0.1, seed=5)
    assert [len(task.train) for task in mixed] == [100, 110, 120]
    task = mixed[2]
    for number in (0, 1):
        extra = slice(100 + 10 * number, 110 + 10 * number)
        for x, y in zip(train(task).x[extra], train(task).y[extra], strict=True):
            row = int((train(stream[number]).x == x).flatten(1).all(1).nonzero())
            assert int(train(stream[number]).y[row]) == int(y)
    assert torch.equal(train(task).x, train(replay(stream, 0.1, seed=5)[2]).x)
    with pytest.raises(ValueError, match="share"):
        replay(stream, 1.5)


def test_replay_of_text_adds_stretches() -> None:
    texts = {"a": torch.zeros(100, dtype=torch.long), "b": torch.ones(100, dtype=torch.long)}
    stream = replay(streams.domains(texts, vocabulary=2, context=4, steps=2), 0.2)
    assert torch.bincount(stream[1].train.tokens).tolist() == [18, 90]


def test_streams_by_name_load_their_data() -> None:
    stream = streams.stream("random-labels", 0, data="digits", count=50, tasks=2, epochs=1)
    assert stream.shape == (1, 8, 8) and len(stream[1].train) == 50
    assert len(streams.stream("label-shift", 0, data="digits", per_task=30, tasks=1, epochs=1)[0].train) == 30


def test_the_domains_can_be_bytes_or_characters(tmp_path: Any) -> None:
    for name, text in (("one", "abcabc" * 30), ("two", "xyz" * 60)):
        (tmp_path / f"{name}.txt").write_text(text, "utf-8")
    paths = [str(tmp_path / "one.txt"), str(tmp_path / "two.txt")]
    by_character = streams.stream("domains", 0, data=paths, tokens="character", context=4, steps=1)
    assert len(by_character) == 2 and by_character.classes in (6, 7)
    assert streams.stream("domains", 0, data=paths, context=4, steps=1).classes == 256
    with pytest.raises(ValueError, match="neither"):
        streams.stream("domains", 0, data=paths, tokens="word", context=4, steps=1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: streams.warm_start(images(), share=0.0, first_epochs=1, epochs=1, seed=0), "share"),
        (lambda: streams.class_incremental(images(), phases=9, epochs=1, seed=0), "phases=9"),
        (lambda: streams.label_shift(images(), tasks=1, epochs=1, concentration=0, seed=0), "concentration"),
        (lambda: streams.random_labels(images(), tasks=0, epochs=1, seed=0), "at least one task"),
        (lambda: streams.stream("nowhere", 0), "there is no stream 'nowhere'"),
    ],
)
def test_what_cannot_be_is_said(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_a_stream_has_ends() -> None:
    stream: Stream = BUILDERS["continual"](0)
    with pytest.raises(IndexError):
        stream[3]
