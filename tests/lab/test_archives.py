"""The standard archives are read to the byte; what is damaged, incomplete or hostile is refused by name."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive_files as files
from rekindle.lab.data import archives
from rekindle.lab.data.archives import Corrupt


def expected_cifar(classes: int) -> tuple[Any, Any, Any, Any]:
    parts = files.cifar_parts(classes=classes)
    x = np.concatenate([data for _, data, _ in parts[:-1]]).reshape(-1, 3, 32, 32)
    y = [label for _, _, labels in parts[:-1] for label in labels]
    return x, y, parts[-1][1].reshape(-1, 3, 32, 32), parts[-1][2]


@pytest.mark.parametrize("zipped", [True, False])
def test_idx_files_in_a_folder_and_in_an_npm_package(tmp_path: Path, zipped: bool) -> None:
    contents, x, test_x = files.idx_files(zipped=zipped)
    folder = files.write_folder(tmp_path / "mnist", contents)
    package = files.write_tar(tmp_path / "m.tgz", {f"package/data/{name}": c for name, c in contents.items()})
    for path in (folder, package):
        raw = archives.read_idx(path)
        assert np.array_equal(raw.x, x[:, None]) and np.array_equal(raw.test_x, test_x[:, None])
        assert raw.y.tolist() == [i % 10 for i in range(12)] and raw.test_y.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("classes", [10, 100])
def test_cifar_in_its_binary_version(tmp_path: Path, classes: int) -> None:
    contents = files.cifar_binaries(classes=classes)
    for path in (files.write_tar(tmp_path / "c.tar.gz", contents), files.write_folder(tmp_path / "c", contents)):
        raw = archives.read_cifar_binary(path, classes)
        x, y, test_x, test_y = expected_cifar(classes)
        assert np.array_equal(raw.x, x) and np.array_equal(raw.test_x, test_x)
        assert raw.y.tolist() == y and raw.test_y.tolist() == test_y
        assert raw.x.flags.writeable and raw.x.flags.c_contiguous


def test_cifar_sheets_hold_the_same_pixels(tmp_path: Path) -> None:
    raw = archives.read_cifar_sheets(files.write_tar(tmp_path / "c.tgz", files.cifar_sheets()))
    x, y, test_x, test_y = expected_cifar(10)
    assert np.array_equal(raw.x, x) and np.array_equal(raw.test_x, test_x)
    assert raw.y.tolist() == y and raw.test_y.tolist() == test_y


@pytest.mark.parametrize("write", [files.write_zip, files.write_folder])
def test_tiny_imagenet(tmp_path: Path, write: Callable[[Path, dict[str, bytes]], Path]) -> None:
    contents, levels = files.tiny_imagenet()
    raw = archives.read_tiny_imagenet(write(tmp_path / "tiny", contents))
    assert raw.x.shape == (4, 3, 64, 64) and raw.test_x.shape == (2, 3, 64, 64) and raw.classes == 2
    # Classes are numbered in the order of their names; a flat JPEG comes back within one gray level.
    by_class = {
        label: sorted(image.mean().round() for image, y in zip(raw.x, raw.y, strict=True) if y == label)
        for label in (0, 1)
    }
    for label, word in enumerate(("n01", "n02")):
        wanted = sorted(level for name, level in levels.items() if f"/{word}/" in name)
        assert np.allclose(by_class[label], wanted, atol=1)
    answers = {int(image.mean().round() > 220): int(y) for image, y in zip(raw.test_x, raw.test_y, strict=True)}
    assert answers == {0: 0, 1: 1}


@pytest.mark.parametrize("share", [0.2, 0.6, 0.99])
def test_a_truncated_archive_is_a_clear_error(tmp_path: Path, share: float) -> None:
    tar = files.write_tar(tmp_path / "c.tar.gz", files.cifar_binaries())
    archive = files.write_zip(tmp_path / "t.zip", files.tiny_imagenet()[0])
    for path, read in ((tar, lambda p: archives.read_cifar_binary(p, 10)), (archive, archives.read_tiny_imagenet)):
        content = path.read_bytes()
        path.write_bytes(content[: int(share * len(content))])
        with pytest.raises(Corrupt, match=path.name):
            read(path)


def test_an_archive_of_something_else_is_a_clear_error(tmp_path: Path) -> None:
    noise = tmp_path / "cifar-10-binary.tar.gz"
    noise.write_bytes(b"<html>not found</html>")
    with pytest.raises(Corrupt, match="fetch it again"):
        archives.read_cifar_binary(noise, 10)
    with pytest.raises(Corrupt, match="data_batch_1"):
        archives.read_cifar_binary(files.write_tar(tmp_path / "other.tar.gz", {"readme": b"hello"}), 10)


def test_a_missing_batch_is_named(tmp_path: Path) -> None:
    contents = files.cifar_binaries()
    del contents["cifar-10-batches-bin/data_batch_3.bin"]
    with pytest.raises(Corrupt, match=r"has no data_batch_3\.bin"):
        archives.read_cifar_binary(files.write_folder(tmp_path, contents), 10)


def test_labels_out_of_range_or_number_are_refused(tmp_path: Path) -> None:
    contents, _, _ = files.idx_files()
    high = {**contents, "train-labels-idx1-ubyte.gz": gzip.compress(files.idx(np.full(12, 11, np.uint8)))}
    with pytest.raises(Corrupt, match="labels run from 11 to 11"):
        archives.read_idx(files.write_folder(tmp_path / "high", high))
    few = {**contents, "train-labels-idx1-ubyte.gz": gzip.compress(files.idx(np.zeros(11, np.uint8)))}
    with pytest.raises(Corrupt, match="12 training images do not match"):
        archives.read_idx(files.write_folder(tmp_path / "few", few))


def test_labels_that_are_no_json_and_sheets_of_another_width_are_refused(tmp_path: Path) -> None:
    contents = files.cifar_sheets()
    with pytest.raises(Corrupt, match="train_lables"):
        archives.read_cifar_sheets(files.write_folder(tmp_path / "a", contents | {"package/train_lables.json": b"[1,"}))
    narrow = files.picture(files.pixels(4, 1000, 3), "PNG")
    with pytest.raises(Corrupt, match="1000 pixels wide"):
        archives.read_cifar_sheets(files.write_folder(tmp_path / "b", contents | {"package/data_batch_2.png": narrow}))
    with pytest.raises(Corrupt, match=r"test_batch\.png is not a readable"):
        archives.read_cifar_sheets(
            files.write_folder(tmp_path / "c", contents | {"package/test_batch.png": b"\x89PNG"})
        )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "begins with nothing"),
        (b"\x00\x00\x0d\x01\x00\x00\x00\x01\x00\x00\x00\x00", "unsigned bytes"),
        (b"\x00\x00\x08\x01\x00\x00\x00\x09\x01", "asks for 17"),
        (b"\x00\x00\x08\x09", "9 dimensions"),
        (b"\x1f\x8b\x08damaged", "damaged gzip"),
        (bytes([0, 0, 8, 3]) + b"\xff" * 12, "header"),
    ],
)
def test_a_wrong_idx_file_says_what_is_wrong(content: bytes, says: str) -> None:
    with pytest.raises(Corrupt, match=says):
        archives.idx(content, "some file")


def test_a_member_that_claims_too_much_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_MEMBER", 1000)
    with pytest.raises(Corrupt, match="more than any file"):
        archives.read_cifar_binary(files.write_tar(tmp_path / "c.tar.gz", files.cifar_binaries()), 10)
