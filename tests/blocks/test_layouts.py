"""Index rules: every element belongs to one matrix, reading and writing are inverse, nothing else is touched."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rekindle.blocks.layouts import Block, Layout, LayoutError, Recipe, convolution, matrices

SIZE = st.integers(1, 4)
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])


@st.composite
def recipes(draw: st.DrawFn) -> tuple[Recipe, tuple[int, ...]]:
    """Any pattern of up to six factors on up to four axes, with or without parts, and a shape that fits."""
    names = draw(st.permutations(["out", "in", "head", "expert", "part", "dim"]))
    count = draw(st.integers(2, len(names)))
    names = list(names[:count])
    for needed in ("in", "out"):
        if needed not in names:
            names.append(needed)
    sizes = {name: draw(SIZE) for name in names}
    part: dict[str, int] = {}
    if "part" in names:
        part = {f"p{i}": draw(SIZE) for i in range(draw(st.integers(1, 3)))}
        sizes["part"] = sum(part.values())
    cuts = sorted(draw(st.sets(st.integers(1, len(names) - 1), max_size=3)))
    groups = [names[a:b] for a, b in itertools.pairwise([0, *cuts, len(names)])]
    pattern = " ".join(g[0] if len(g) == 1 else f"({' '.join(g)})" for g in groups)
    shape = tuple(math.prod(sizes[n] for n in g) for g in groups)
    known = {n: s for n, s in sizes.items() if n not in ("in", "part")}
    options = {"count": "expert" if "expert" in names else "", "heads": "head" if "head" in names else ""}
    return matrices(pattern, part=part, **options, **known), shape  # type: ignore[arg-type]


def slow_read(layout: Layout, tensor: Tensor) -> Tensor:
    """The definition, one element at a time: coordinates of the factors → (matrix, row, column)."""
    taken = {factor: (start, length) for factor, start, length in layout.take}
    result = torch.full(layout.sizes, -1, dtype=tensor.dtype)
    flat = tensor.reshape(-1)
    for position, place in enumerate(itertools.product(*(range(n) for n in layout.split))):
        inside = [taken.get(f, (0, n)) for f, n in enumerate(layout.split)]
        if any(not start <= x < start + length for x, (start, length) in zip(place, inside, strict=True)):
            continue
        index = []
        for group in (layout.count, layout.out, layout.in_):
            number = 0
            for factor in group:
                number = number * inside[factor][1] + place[factor] - inside[factor][0]
            index.append(number)
        result[tuple(index)] = flat[position]
    return result


@given(recipes())
@settings(max_examples=150, deadline=None)
def test_reading_follows_the_definition(case: tuple[Recipe, tuple[int, ...]]) -> None:
    recipe, shape = case
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    for block in recipe(shape):
        assert torch.equal(block.read(tensor), slow_read(block.layout, tensor))
        assert torch.equal(block.per_head().read(tensor), slow_read(block.per_head().layout, tensor))


@given(recipes(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_every_element_is_in_exactly_one_matrix(case: tuple[Recipe, tuple[int, ...]], split: bool) -> None:
    recipe, shape = case
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    blocks = [b.per_head() if split else b for b in recipe(shape)]
    read = torch.cat([block.read(tensor).flatten() for block in blocks])
    assert torch.equal(read.sort().values, torch.arange(math.prod(shape)))
    assert all(tuple(b.read(tensor).shape) == (b.count, b.out, b.in_) for b in blocks)


@given(recipes(), DTYPES, st.booleans(), st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_writing_what_was_read_changes_no_bit(
    case: tuple[Recipe, tuple[int, ...]], dtype: torch.dtype, strided: bool, seed: int
) -> None:
    recipe, shape = case
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(shape, generator=generator).to(dtype)
    if strided:  # the same numbers in another memory order, as channels_last has
        tensor = tensor.permute(*reversed(range(len(shape)))).contiguous().permute(*reversed(range(len(shape))))
    expected, pointer, strides = tensor.clone(), tensor.data_ptr(), tensor.stride()
    for block in recipe(shape):
        block.write(tensor, block.read(tensor).clone())
    assert torch.equal(tensor, expected)
    assert (tensor.data_ptr(), tensor.stride()) == (pointer, strides)


@given(recipes(), st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_writing_touches_nothing_else(case: tuple[Recipe, tuple[int, ...]], which: int) -> None:
    recipe, shape = case
    blocks = recipe(shape)
    block = blocks[which % len(blocks)]
    tensor = torch.arange(math.prod(shape)).reshape(shape).double()
    mine = block.read(tensor).clone().flatten()
    block.write(tensor, -1 - block.read(tensor).clone())
    changed = (tensor.flatten() < 0).nonzero().flatten()
    assert torch.equal(changed, mine.long().sort().values)
    assert torch.equal(block.read(tensor).flatten(), -1 - mine)


@given(recipes(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_blocks_survive_json(case: tuple[Recipe, tuple[int, ...]], split: bool) -> None:
    recipe, shape = case
    for block in recipe(shape):
        block = block.per_head() if split else block
        assert Block.from_dict(json.loads(json.dumps(block.to_dict()))) == block


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kernel", [(3,), (3, 2), (2, 3, 2)])
@pytest.mark.parametrize("flat", [False, True])
def test_convolution_matrices_rebuild_the_convolution(
    kernel: tuple[int, ...], groups: int, transposed: bool, flat: bool
) -> None:
    """The convolution as sums over taps of W_tap·x, written with the block's matrices, equals torch's."""
    dims, out, in_ = len(kernel), 6, 4
    name = f"Conv{'Transpose' if transposed else ''}{dims}d"
    layer = getattr(torch.nn, name)(in_, out, kernel, groups=groups, bias=False).double()
    shape = tuple(layer.weight.shape)
    block = convolution(shape, groups=groups, transposed=transposed, flat=flat)(shape)[0]
    per_group = (out // groups, in_ // groups)
    taps = list(itertools.product(*(range(k) for k in kernel)))
    read = block.read(layer.weight).detach()
    if flat:
        assert (block.count, block.out, block.in_, block.taps) == (groups, per_group[0], per_group[1] * len(taps), 1)
        tap_matrices = read.reshape(groups, per_group[0], per_group[1], len(taps)).permute(0, 3, 1, 2)
    else:
        assert (block.count, block.taps) == (groups * len(taps), len(taps))
        assert (block.out, block.in_) == per_group
        tap_matrices = read.reshape(groups, len(taps), *per_group)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, in_, *(5,) * dims, generator=generator, dtype=torch.float64)
    y = layer(x).detach()
    expected = torch.zeros_like(y)
    for position in itertools.product(*(range(n) for n in y.shape[2:])):
        for t, tap in enumerate(taps):
            sign = -1 if transposed else 1
            source = [p + sign * k for p, k in zip(position, tap, strict=True)]
            if any(not 0 <= s < 5 for s in source):
                continue
            pixel = x[(0, slice(None), *source)].reshape(groups, -1, 1)
            expected[(0, slice(None), *position)] += (tap_matrices[:, t] @ pixel).flatten()
    assert torch.allclose(y, expected)


def test_a_split_per_head_keeps_the_parents_shape() -> None:
    block = matrices("(part head dim) in", part=("query", "key", "value"), head=4, heads="head")((96, 32))[1]
    split = block.per_head()
    assert (split.count, split.out, split.in_, split.fans) == (4, 8, 32, (32, 32))
    assert split.per_head() == split
    assert matrices("out in")((4, 4))[0].per_head() == matrices("out in")((4, 4))[0]


@pytest.mark.parametrize(
    ("pattern", "options", "shape"),
    [
        ("(part out) in", {"part": ("query", "key", "value")}, (10, 4)),
        ("(head dim) in", {"head": 3, "dim": 2}, (7, 4)),
        ("(head dim) in", {}, (8, 4)),
        ("out in", {}, (2, 3, 4)),
    ],
)
def test_a_shape_that_does_not_fit_is_an_error(
    pattern: str, options: dict[str, object], shape: tuple[int, ...]
) -> None:
    with pytest.raises(LayoutError, match=str(shape[0]) if len(shape) == 2 else "axes"):
        matrices(pattern, **options)(shape)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["out out", "out in part", "a (b c)"])
def test_a_pattern_that_does_not_name_its_factors_once_is_an_error(wrong: str) -> None:
    with pytest.raises(LayoutError, match="pattern"):
        matrices(wrong, heads="head" if "part" in wrong else "")


def test_wrong_tensors_are_refused_before_a_write() -> None:
    block = matrices("out in")((4, 3))[0]
    with pytest.raises(LayoutError, match=r"\(4, 3\).*\(3, 4\)"):
        block.read(torch.zeros(3, 4))
    with pytest.raises(LayoutError, match="expected matrices"):
        block.write(torch.zeros(4, 3), torch.zeros(1, 3, 4))
    with pytest.raises(LayoutError, match="outside"):
        Layout((4, 3), (4, 3), (), (0,), (1,), ((0, 3, 2),))
    with pytest.raises(LayoutError, match="does not split"):
        Layout((4, 3), (2, 6), (), (0,), (1,))
