"""Every tensor has its own bytes: records of the right size, no overlaps, no number lost to a dtype."""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rekindle.checkpoint import CheckpointError, fire_file, open_checkpoint
from rekindle.checkpoint.dcp_metadata import Chunk, Range, _check_grid


def rewritten(source: Path, target: Path, name: str, change: Any) -> None:
    """The archive with the bytes of one record replaced."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for item in old.namelist():
            data = old.read(item)
            new.writestr(item, change(data) if item.endswith(name) else data)


@pytest.mark.parametrize("change", [lambda data: data[:-8], lambda data: data + bytes(8), lambda data: b""])
def test_a_record_of_another_size_than_its_storage_is_refused(change: Any, tmp_path: Path) -> None:
    torch.save({"a.weight": torch.randn(4, 4), "b.weight": torch.randn(4, 4)}, tmp_path / "in.pt")
    rewritten(tmp_path / "in.pt", tmp_path / "bad.pt", "data/0", change)
    with pytest.raises(CheckpointError, match="should have 64 bytes, its record has"):
        open_checkpoint(tmp_path / "bad.pt")


def test_a_missing_record_is_refused(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.randn(4, 4)}, tmp_path / "in.pt")
    with zipfile.ZipFile(tmp_path / "in.pt") as old, zipfile.ZipFile(tmp_path / "bad.pt", "w") as new:
        for item in old.namelist():
            if not item.endswith("data/0"):
                new.writestr(item, old.read(item))
    with pytest.raises(CheckpointError, match="the record of storage '0' is missing"):
        open_checkpoint(tmp_path / "bad.pt")


def test_overlapping_views_are_skipped_with_the_reason_and_keep_their_bytes(tmp_path: Path) -> None:
    base = torch.randn(32, 16)
    state = {"full.weight": base, "full.bias": torch.zeros(32), "part.weight": base[:16]}
    state |= {"a.weight": torch.randn(8, 8), "z.weight": torch.eye(8)}
    torch.save(state, tmp_path / "in.pt")
    receipt = fire_file(tmp_path / "in.pt", tmp_path / "out.pt", heads="[cz]")
    after = torch.load(tmp_path / "out.pt", weights_only=True)
    assert "shares memory with part.weight" in receipt.skipped["full.weight"]
    assert "shares memory with full.weight" in receipt.skipped["part.weight"]
    assert torch.equal(after["full.weight"], base)
    assert not torch.equal(after["a.weight"], state["a.weight"])


def test_a_weight_that_shares_bytes_with_an_optimizer_slot_is_skipped(tmp_path: Path) -> None:
    base = torch.randn(8, 8)
    tree = {"model": {"a.weight": base, "b.weight": torch.randn(8, 8)}, "other": [base[2:4]]}
    torch.save(tree, tmp_path / "in.pt")
    with open_checkpoint(tmp_path / "in.pt") as checkpoint:
        assert checkpoint.shared == {"a.weight": "['other'][0]"}


def test_a_weight_that_overlaps_itself_is_skipped(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.randn(1, 8).expand(8, 8), "b.weight": torch.randn(4, 4)}, tmp_path / "in.pt")
    with open_checkpoint(tmp_path / "in.pt") as checkpoint:
        assert checkpoint.shared == {"a.weight": "itself"}


def test_neighboring_views_of_one_storage_are_separate_weights(tmp_path: Path) -> None:
    base = torch.randn(24, 8)
    torch.save({"a.weight": base[:8], "b.weight": base[8:16], "c.weight": base[16:]}, tmp_path / "in.pt")
    receipt = fire_file(tmp_path / "in.pt", tmp_path / "out.pt", heads="[cz]", targets="auto")
    after = torch.load(tmp_path / "out.pt", weights_only=True)
    assert receipt.changed == ("a.weight", "b.weight")
    assert torch.equal(after["c.weight"], base[16:])


def test_a_name_listed_as_dropped_that_another_shard_holds_is_a_tensor_of_its_own(tmp_path: Path) -> None:
    save_file({"a.weight": torch.eye(4)}, tmp_path / "x-1.safetensors", metadata={"b.weight": "a.weight"})
    save_file({"b.weight": torch.ones(4, 4)}, tmp_path / "x-2.safetensors")
    index = {"weight_map": {"a.weight": "x-1.safetensors", "b.weight": "x-2.safetensors"}}
    (tmp_path / "x.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.tied == {}
        assert list(checkpoint.meta_tensors()) == ["a.weight", "b.weight"]


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_a_dtype_that_cannot_hold_a_number_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    state = {"a.weight": torch.randn(4, 4), "a.bias": torch.full((4,), 1e6), "b.weight": torch.randn(4, 4)}
    source = tmp_path / f"in.{kind}"
    save_file(state, source) if kind == "safetensors" else torch.save(state, source)
    with pytest.raises(CheckpointError, match=r"cannot hold 'a\.bias'"):
        fire_file(source, tmp_path / f"out.{kind}", dtype="float16", heads="b")
    assert [path.name for path in tmp_path.iterdir()] == [source.name]
    fire_file(source, tmp_path / f"out.{kind}", dtype="bfloat16", heads="b")


def test_infinity_stays_infinity_in_another_dtype(tmp_path: Path) -> None:
    state = {"a.weight": torch.randn(4, 4), "mask": torch.tensor([-torch.inf, 1.0]), "b.weight": torch.randn(4, 4)}
    save_file(state, tmp_path / "in.safetensors")
    fire_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", dtype="float16", heads="b")
    assert load_file(tmp_path / "out.safetensors")["mask"].tolist() == [-torch.inf, 1.0]


def header(table: Any, data: bytes = b"") -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_shapes_beyond_torch_are_a_file_error(tmp_path: Path) -> None:
    for shape in ([0, 2**61, 2**61], [2**40, 0, 2**40]):
        path = tmp_path / "in.safetensors"
        path.write_bytes(header({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}))
        with pytest.raises(CheckpointError, match="too large for torch"):
            open_checkpoint(path)


def test_an_endless_name_is_refused(tmp_path: Path) -> None:
    save_file({"_" * 100_000: torch.zeros(2, 2)}, tmp_path / "in.safetensors")
    with pytest.raises(CheckpointError, match="name of 100000 characters"):
        open_checkpoint(tmp_path / "in.safetensors")


def test_a_duplicate_at_the_end_of_many_keys_is_found_at_once(tmp_path: Path) -> None:
    entry = b'{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    names = [*range(20_000), 19_999]
    text = b"{" + b",".join(b'"%d":%s' % (name, entry) for name in names) + b"}"
    (tmp_path / "in.safetensors").write_bytes(header(text))
    with pytest.raises(CheckpointError, match="'19999' appears twice"):
        open_checkpoint(tmp_path / "in.safetensors")


def chunks(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> list[Chunk]:
    return [Chunk(start, shape, Range("a", 0, 0)) for start, shape in boxes]


def test_chunks_of_a_grid_are_accepted_and_overlapping_ones_refused() -> None:
    _check_grid("x", (4, 6), chunks(((0, 0), (2, 6)), ((2, 0), (2, 3)), ((2, 3), (2, 3))))
    _check_grid("x", (), chunks(((), ())))
    _check_grid("x", (2000,), chunks(*(((i,), (1,)) for i in range(2000))))
    with pytest.raises(CheckpointError, match="overlap"):
        _check_grid("x", (4, 4), chunks(((0, 0), (2, 4)), ((1, 0), (2, 4))))
    with pytest.raises(CheckpointError, match="do not form a grid"):
        _check_grid("x", (1000, 1000), chunks(*(((i, i), (1, 1)) for i in range(1000))))
