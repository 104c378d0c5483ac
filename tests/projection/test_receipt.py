"""A receipt adds up, prints within the terminal, and leaves as dict, JSON and DataFrame."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

import rekindle
from rekindle.optimizers import StateReset
from rekindle.projection import receipt as receipts
from rekindle.projection.method import MethodError
from rekindle.projection.receipt import BlockRecord, Meter, Receipt

FIRE = BlockRecord(
    "encoder.layers.0.attention.self.query.weight",
    "query",
    count=3,
    out=64,
    in_=32,
    scale=math.sqrt(2),
    dfi_before=96.0,
    dfi_after=1e-5,
    sfe=3.0,
    sfe_relative=0.75,
    norm_before=2.0,
    norm_after=9.8,
    residual=1e-7,
    residual_stored=2e-7,
    steps=6,
    completed=2,
    converged=True,
)
REDO = BlockRecord("fc.weight", counts={"rows": 3, "columns": 4}, values={"threshold": 0.1})


def receipt(*records: BlockRecord) -> Receipt:
    return Receipt(
        "fire",
        records or (FIRE, REDO),
        {"head.weight": "output head", "a.bias": "bias", "b.bias": "bias"},
        {"scale": "paper"},
        StateReset("fresh", ("AdamW",), 2, 6, 6),
        gradients_cleared=2,
        seconds=0.5,
        notes=("one note",),
    )


def test_totals_add_and_take_the_worst() -> None:
    second = BlockRecord("b", dfi_before=4.0, dfi_after=0.0, sfe=1.0, norm_before=4.0, residual=1e-3, steps=2)
    totals = receipt(FIRE, second, REDO).totals()
    assert totals["parameters"] == 3
    assert totals["matrices"] == 5
    assert totals["dfi_before"] == 100.0
    assert totals["sfe_relative"] == pytest.approx(4.0 / (2.0**2 + 4.0**2))
    assert totals["residual"] == 1e-3
    assert totals["steps"] == 6
    assert totals["completed"] == 2
    assert totals["counts"] == {"rows": 3, "columns": 4}


def test_what_nobody_measured_is_none_and_not_zero() -> None:
    totals = receipt(REDO).totals()
    assert totals["dfi_before"] is None
    assert totals["sfe_relative"] is None
    assert totals["residual"] is None


def test_a_nan_is_the_worst_residual() -> None:
    records = [BlockRecord("a", residual=value) for value in (1.0, math.nan, 2.0)]
    assert math.isnan(receipt(*records).totals()["residual"])


def test_dfi_per_dimension_divides_by_k_times_count() -> None:
    assert FIRE.to_dict()["dfi_before_per_dimension"] == 96.0 / (32 * 3)
    assert REDO.to_dict()["dfi_before_per_dimension"] is None


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_the_table_fits_the_terminal(width: int) -> None:
    records = [
        BlockRecord(f"a.rather.long.name.of.a.layer.{i}.weight", "mlp-out", count=i, out=512, in_=2048, scale=0.5,
                    dfi_before=1e9, dfi_after=1e-9, sfe_relative=0.5, norm_before=100.0, norm_after=20.0,
                    residual=1e-8, steps=7)
        for i in range(100)
    ]  # fmt: skip
    text = receipt(*records).table(width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) < 60
    assert "60 more" in text
    if width < 200:  # what all names begin with is said once, in the heading, where room is short
        assert "\n0.weight" in text
        assert "\n99.weight" in text
    assert "DfI" in text


def test_the_table_says_everything_that_happened() -> None:
    text = receipt().table(120)
    said = "2 parameters|4 matrices|query|rows 3|6 of 6 slots|2 stale gradients|2 × bias|output head|one note|0.75"
    for part in (*said.split("|"), "directions completed 2"):
        assert part in text, part


def test_json_holds_what_the_dict_holds_and_no_nan() -> None:
    odd = receipt(BlockRecord("a", residual=math.nan, scale=math.inf))
    read = json.loads(odd.to_json())
    assert read == odd.to_dict()
    assert read["records"][0]["residual"] is None
    assert read["optimizer"]["reset"] == 6
    assert read["skipped"]["head.weight"] == "output head"


def test_the_frame_has_a_row_a_record_and_a_column_a_count() -> None:
    pytest.importorskip("pandas")
    frame = receipt().to_frame()
    assert list(frame["name"]) == [FIRE.name, REDO.name]
    assert frame["rows"][1] == 3
    assert frame["threshold"][1] == 0.1
    assert frame["dfi_before"][0] == 96.0


def test_without_pandas_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(ImportError, match=r"rekindle\[report\]"):
        receipt().to_frame()


def test_a_method_error_carries_the_partial_receipt() -> None:
    partial = receipt(FIRE)
    with pytest.raises(MethodError, match="SVD") as caught:
        raise MethodError("the SVD failed", partial)
    assert caught.value.receipt is partial


def test_the_meter_reads_the_growth_of_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    block = bytearray(20_000_000)
    block[::4096] = b"x" * len(block[::4096])
    assert receipts._peak() > 20_000_000  # bytes, not kilobytes
    peaks = iter([1000, 5000, 4000])
    monkeypatch.setattr(receipts, "_peak", lambda: next(peaks))
    meter = Meter()
    assert meter.memory == 4000
    assert meter.memory == 3000
    assert meter.seconds > 0


def test_state_resets_add() -> None:
    total = StateReset("fresh", ("Adam",), 1, 3, 3) + StateReset("fresh", ("LBFGS",), 1, 9, 9, dropped=("LBFGS",))
    assert total == StateReset("fresh", ("Adam", "LBFGS"), 2, 12, 12, dropped=("LBFGS",))
    assert "whole history of LBFGS" in str(total)
    assert "left as it was" in str(StateReset("none", ("Adam",)))


def test_a_second_receipt_does_not_contradict_the_first() -> None:
    """What the first call left behind is what the second finds, or is unmeasured: never a number of rounding."""
    torch.manual_seed(0)
    net = nn.ModuleList([nn.Linear(20, 64), nn.Linear(64, 64), nn.Linear(96, 48), nn.Linear(48, 48).double()])
    first, second = rekindle.fire(net, include="3"), rekindle.fire(net, include="3")
    for then, now in zip(first.records, second.records, strict=True):
        assert then.dfi_before is not None and then.dfi_before > 1
        assert now.dfi_before is None or now.dfi_before == pytest.approx(then.dfi_after, rel=0.5)
        assert now.dfi_free_before is None or now.dfi_free_before >= 0
