"""Broken and hostile files: every one a CheckpointError of one line, never another error, never a partial output."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from checkpoints import save_dcp, save_sharded, small_model
from rekindle.checkpoint import CheckpointError, fire_file, open_checkpoint


def survives(path: Path) -> bool:
    """Open, read and fire at a file; whether it was accepted. Anything but a CheckpointError fails the test."""
    folder = path.parent
    before = {p.name for p in folder.iterdir()}
    out = folder / "out"
    try:
        with open_checkpoint(path) as checkpoint:
            for name in checkpoint.names:
                checkpoint.read(name)
            _ = checkpoint.optimizer
        fire_file(path, out)
    except CheckpointError as error:
        message = str(error)
    else:
        assert {p.name for p in folder.iterdir()} == {*before, "out"}
        return True
    assert "\n" not in message
    assert len(message) <= 600
    assert {p.name for p in folder.iterdir()} == before
    return False


def refused(path: Path, words: str = ".") -> None:
    with pytest.raises(CheckpointError, match=words), open_checkpoint(path):
        pass
    assert not survives(path)


def safetensors_bytes(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: Any = "F32", shape: Any = (2, 2), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HEADERS: dict[str, bytes] = {
    "empty": b"",
    "seven bytes": b"1234567",
    "huge header": safetensors_bytes({}, length=2**63),
    "header of 100 GB": safetensors_bytes({}, length=10**11),
    "header longer than the file": safetensors_bytes({"a": entry()}, length=5000),
    "no JSON": safetensors_bytes(b"{nothing"),
    "a list": safetensors_bytes([]),
    "deep nesting": safetensors_bytes(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "endless number": safetensors_bytes(b'{"a":{"dtype":"F32","shape":[' + b"9" * 6000 + b'],"data_offsets":[0,16]}}'),
    "not UTF-8": safetensors_bytes(b'{"\xff\xfe":1}'),
    "half a surrogate": safetensors_bytes(b'{"\\ud800":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}', bytes(16)),
    "twice the same name": safetensors_bytes(
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}',
        bytes(16),
    ),
    "overlap": safetensors_bytes({"a": entry(), "b": entry(offsets=(8, 24))}, bytes(24)),
    "the same bytes twice": safetensors_bytes({"a": entry(), "b": entry()}, bytes(16)),
    "hole": safetensors_bytes({"a": entry(), "b": entry(offsets=(20, 36))}, bytes(36)),
    "beyond the end": safetensors_bytes({"a": entry()}, bytes(8)),
    "too long": safetensors_bytes({"a": entry()}, bytes(17)),
    "negative offset": safetensors_bytes({"a": entry(offsets=(-16, 0))}),
    "backwards": safetensors_bytes({"a": entry(offsets=(16, 0))}, bytes(16)),
    "float offset": safetensors_bytes({"a": entry(offsets=(0.0, 16.0))}, bytes(16)),
    "true as a size": safetensors_bytes({"a": entry(shape=(True, 4))}, bytes(16)),
    "overflowing shape": safetensors_bytes({"a": entry(shape=(2**61, 2**61, 2**61))}, bytes(16)),
    "too many dimensions": safetensors_bytes({"a": entry(shape=(1,) * 5000, offsets=(0, 4))}, bytes(4)),
    "wrong size": safetensors_bytes({"a": entry(shape=(3, 3))}, bytes(16)),
    "unknown dtype": safetensors_bytes({"a": entry(dtype="F33")}, bytes(16)),
    "dtype of a list": safetensors_bytes({"a": entry(dtype=["F32"])}, bytes(16)),
    "missing field": safetensors_bytes({"a": {"dtype": "F32"}}, bytes(16)),
    "further field": safetensors_bytes({"a": {**entry(), "code": "x"}}, bytes(16)),
    "metadata with numbers": safetensors_bytes({"__metadata__": {"a": 1}, "a": entry()}, bytes(16)),
    "metadata of 0": safetensors_bytes({"__metadata__": 0, "a": entry()}, bytes(16)),
    "metadata of text": safetensors_bytes({"__metadata__": "no", "a": entry()}, bytes(16)),
    "something else": b"GIF89a and so on, nothing to see here",
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_broken_safetensors_file_is_refused(case: str, tmp_path: Path) -> None:
    (tmp_path / "in.safetensors").write_bytes(HEADERS[case])
    refused(tmp_path / "in.safetensors")


VALID = save(dict(small_model(width=4).state_dict()))


def torch_bytes() -> bytes:
    buffer = io.BytesIO()
    torch.save({"state_dict": small_model(width=4).state_dict(), "epoch": 1}, buffer)
    return buffer.getvalue()


TORCH = torch_bytes()


def mutated(data: bytes, edits: list[tuple[float, int]], cut: float | None) -> bytes:
    new = bytearray(data)
    for where, value in edits:
        new[int(where * (len(new) - 1))] = value
    return bytes(new if cut is None else new[: int(cut * len(new))])


EDITS = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=6)
CUT = st.none() | st.floats(0, 0.999)


@settings(max_examples=150)
@given(edits=EDITS, cut=CUT, early=st.booleans())
def test_any_damage_to_a_safetensors_file_is_refused_or_harmless(
    edits: list[tuple[float, int]], cut: float | None, early: bool
) -> None:
    if early:  # aim at the header
        edits = [(where * 700 / len(VALID), value) for where, value in edits]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "in.safetensors")
        path.write_bytes(mutated(VALID, edits, cut))
        accepted = survives(path)
        assert not accepted or cut is None


@settings(max_examples=120)
@given(edits=EDITS, cut=CUT)
def test_any_damage_to_a_torch_file_is_refused_or_harmless(edits: list[tuple[float, int]], cut: float | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "in.ckpt")
        path.write_bytes(mutated(TORCH, edits, cut))
        survives(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=8,
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "I64", "F4", "X"]) | JSON,
        "shape": st.lists(st.integers(-1, 5), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(-4, 70), min_size=2, max_size=2) | JSON,
    }
)


@settings(max_examples=150)
@given(header=st.dictionaries(st.text(max_size=8), ENTRY | JSON, max_size=4), data=st.binary(max_size=64))
def test_any_header_is_refused_or_sound(header: dict[str, Any], data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "in.safetensors")
        path.write_bytes(safetensors_bytes(header, data))
        survives(path)


@pytest.mark.parametrize(
    "shard",
    ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b", "C:x", "x\0y", None, 3, ["a"]],
)
def test_path_tricks_in_the_index_are_refused(shard: Any, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    save_sharded(small_model().state_dict(), folder)
    save_file({"0.weight": torch.zeros(2, 2)}, tmp_path / "secret.safetensors")
    index = folder / "model.safetensors.index.json"
    table = json.loads(index.read_text("utf-8"))
    table["weight_map"]["0.weight"] = shard
    index.write_text(json.dumps(table), "utf-8")
    refused(folder, "not a plain file name")


def test_an_index_that_does_not_fit_its_shards_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    save_sharded(small_model().state_dict(), folder)
    index = folder / "model.safetensors.index.json"
    table = json.loads(index.read_text("utf-8"))
    first, second = sorted(set(table["weight_map"].values()))
    for change, words in (
        ({"weight_map": {**table["weight_map"], "0.weight": second}}, "said to be in"),
        ({"weight_map": {**table["weight_map"], "ghost": first}}, "no shard has it"),
        ({"weight_map": {k: v for k, v in table["weight_map"].items() if k != "0.weight"}}, "does not list"),
        ({"weight_map": {**table["weight_map"], "0.weight": "gone.safetensors"}}, "missing"),
        ({"weight_map": {}}, "no weight_map"),
        ([], "JSON object"),
    ):
        index.write_text(json.dumps(change), "utf-8")
        refused(folder, words)
    index.write_text("{broken", "utf-8")
    refused(folder, "JSON")
    index.write_text(json.dumps(table), "utf-8")
    save_file({"0.weight": torch.zeros(2, 2)}, folder / second)
    refused(folder, "too")


class Malice:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/rekindle-was-here",)


def test_pickles_that_run_code_are_refused_unrun(tmp_path: Path) -> None:
    trap = Path("/tmp/rekindle-was-here")
    for new in (True, False):
        torch.save({"a.weight": torch.ones(2, 2), "x": Malice()}, tmp_path / "in", _use_new_zipfile_serialization=new)
        refused(tmp_path / "in", "needs code")
    (tmp_path / "in").write_bytes(pickle.dumps(Malice()))
    refused(tmp_path / "in")
    save_dcp({"model": small_model().state_dict()}, tmp_path / "dcp")
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Malice()))
    refused(tmp_path / "dcp", "not part of the format")
    assert not trap.exists()


def test_zip_tricks_and_trees_without_weights_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}q\x00.")
        archive.writestr("archive/data/0", bytes(10_000_000))  # a bomb of 1000:1
    refused(path, "compressed")
    for tree in (
        {},
        [torch.ones(2, 2)],
        3,
        {"a": {"b": {"c": torch.ones(2)}}},
        {"x": {"a": torch.ones(2)}, "y": {"b": torch.ones(2)}},
    ):
        torch.save(tree, path)
        refused(path)
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), str(path))
    refused(path, "TorchScript")


@pytest.mark.parametrize("flag", ["folder", "encrypted"])
def test_a_record_that_torch_would_not_read_is_refused(flag: str, tmp_path: Path) -> None:
    torch.save({"a.weight": torch.randn(4, 4), "b.weight": torch.randn(4, 4)}, tmp_path / "in.pt")
    data = bytearray((tmp_path / "in.pt").read_bytes())
    entry = data.rindex(b"PK\x01\x02", 0, data.index(b"data/0", data.index(b"PK\x01\x02")))
    data[entry + (38 if flag == "folder" else 8)] |= 0x10 if flag == "folder" else 1
    (tmp_path / "in.pt").write_bytes(data)
    refused(tmp_path / "in.pt", "marked as")


def test_an_old_torch_file_that_torch_refuses_is_refused(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.randn(4, 4)}, tmp_path / "in.pt", _use_new_zipfile_serialization=False)
    data = (tmp_path / "in.pt").read_bytes()
    assert data.count(b"K\x10Ntq") == 1  # 16 numbers, and None for no view: torch wants both
    (tmp_path / "in.pt").write_bytes(data.replace(b"K\x10Ntq", b"K\x10tq"))
    refused(tmp_path / "in.pt", "not enough values")


def test_broken_dcp_folders_are_refused(tmp_path: Path) -> None:
    save_dcp({"model": small_model().state_dict()}, tmp_path / "in")
    path = tmp_path / "in" / ".metadata"
    good = path.read_bytes()

    def change(edit: Any) -> None:
        metadata = pickle.loads(good)
        edit(metadata)
        path.write_bytes(pickle.dumps(metadata))
        refused(tmp_path / "in")

    def first(metadata: Any) -> Any:
        return next(iter(metadata.storage_data.values()))

    change(lambda m: setattr(first(m), "relative_path", "../../etc/passwd"))
    change(lambda m: setattr(first(m), "relative_path", "gone.distcp"))
    change(lambda m: setattr(first(m), "offset", -5))
    change(lambda m: setattr(first(m), "offset", 10**12))
    change(lambda m: setattr(first(m), "length", "long"))
    change(lambda m: setattr(m, "storage_data", None))
    change(lambda m: setattr(m, "state_dict_metadata", 3))
    change(lambda m: m.state_dict_metadata["model.0.weight"].chunks.clear())
    change(lambda m: setattr(m.state_dict_metadata["model.0.weight"], "size", (5, 5)))
    change(lambda m: setattr(m.state_dict_metadata["model.0.weight"].properties, "dtype", "float32"))
    change(lambda m: m.planner_data.update({"model.0.weight": ("model", "0,weight")}))
    change(lambda m: m.storage_data.update(dict.fromkeys(m.storage_data, first(m))))  # two chunks in one place
    path.write_bytes(good.replace(b"torch.strided", b"torch.stryded"))
    refused(tmp_path / "in", "no layout")
    path.write_bytes(good.replace(b"K\x00\x85", b"K\x03\x85"))
    refused(tmp_path / "in", "no memory format")
    path.write_bytes(good[: len(good) // 2])
    refused(tmp_path / "in")
    path.write_bytes(good)
    data = tmp_path / "in" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-100])
    refused(tmp_path / "in", "truncated")


def test_things_that_are_no_checkpoint_are_refused(tmp_path: Path) -> None:
    refused(tmp_path / "gone", "no such file")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no safetensors")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "neither a file nor a folder")
    two = tmp_path / "two"
    two.mkdir()
    for name in ("a", "b"):
        save_file({f"{name}.weight": torch.ones(2, 2)}, two / f"{name}.safetensors")
    refused(two, "which one")
