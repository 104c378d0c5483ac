"""Tables fit the terminal, and names keep the number of their layer."""

from __future__ import annotations

import pytest

from rekindle.tables import elide, table

NAMES = [
    *(f"model.layers.{i}.self_attn.{part}_proj.weight" for i in range(12) for part in "qkvo"),
    "lm_head.weight",
]


@pytest.mark.parametrize("width", [80, 100, 140])
def test_a_table_fits_and_every_name_in_it_is_told_apart(width: int) -> None:
    rows = [[name, "attention-output", "1×4096×4096", "1.41", "123", "0.001"] for name in NAMES]
    lines = table(["parameter", "role", "matrices", "scale", "DfI", "SFE"], rows, width, left=(0, 1))
    assert max(map(len, lines)) <= width
    assert len(set(lines)) == len(NAMES) + 1


@pytest.mark.parametrize("width", range(12, 60))
def test_a_shortened_name_keeps_its_layer_number(width: int) -> None:
    shown = elide("model.language_model.layers.27.mlp.down_proj.weight", width)
    assert len(shown) <= width
    assert "27" in shown


def test_a_reason_takes_the_place_of_numbers_and_goes_on_below_itself() -> None:
    lines = table(["name", "n", "action"], [["a", "1", "project"], ["b", "x " * 40]], 40, left=(0, 1, 2))
    assert lines[1] == "a     1  project"
    assert max(map(len, lines)) <= 40
    assert len(lines) > 4


def test_what_nobody_measured_has_no_column_and_what_tells_least_goes_first() -> None:
    assert table(["a", "b", "c"], [["x", "", "1"]], 80) == ["a  c", "x  1"]
    head, rows = ["a", "bbbbbbbbbb", "cccccccccc"], [["x" * 12, "1", "2"]]
    assert "bbbbbbbbbb" not in table(head, rows, 26, drop=(1,))[0]
