"""Writers of the standard image archives, small ones, byte by byte as their publishers lay them out."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Bytes = NDArray[np.uint8]


def pixels(count: int, *shape: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def idx(array: Bytes) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def idx_files(train: int = 12, test: int = 5, *, zipped: bool = True) -> tuple[dict[str, bytes], Bytes, Bytes]:
    """The four files of MNIST, and the images they hold."""
    x, test_x = pixels(train, 28, 28), pixels(test, 28, 28, seed=1)
    labels = [np.arange(n, dtype=np.uint8) % 10 for n in (train, test)]
    names = ("train-images-idx3", "t10k-images-idx3", "train-labels-idx1", "t10k-labels-idx1")
    contents = [idx(array) for array in (x, test_x, *labels)]
    if zipped:
        return {f"{n}-ubyte.gz": gzip.compress(c) for n, c in zip(names, contents, strict=True)}, x, test_x
    return {f"{n}-ubyte": c for n, c in zip(names, contents, strict=True)}, x, test_x


def cifar_parts(rows: int = 4, classes: int = 10) -> list[tuple[str, Bytes, list[int]]]:
    """(name, rows of 3,072 bytes, labels) of each batch, the test batch last."""
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"] if classes == 10 else ["train", "test"]
    return [(n, pixels(rows, 3072, seed=i), [(i + j) % classes for j in range(rows)]) for i, n in enumerate(names)]


def cifar_binaries(rows: int = 4, classes: int = 10) -> dict[str, bytes]:
    folder, coarse = ("cifar-10-batches-bin", b"") if classes == 10 else ("cifar-100-binary", b"\x07")
    return {
        f"{folder}/{name}.bin": b"".join(
            coarse + bytes([label]) + row.tobytes() for row, label in zip(data, labels, strict=True)
        )
        for name, data, labels in cifar_parts(rows, classes)
    }


def cifar_sheets(rows: int = 4) -> dict[str, bytes]:
    """The npm package: each row of a PNG is one image, its pixels one after the other."""
    parts = cifar_parts(rows)
    files = {}
    for name, data, _ in parts:
        sheet = data.reshape(-1, 3, 1024).transpose(0, 2, 1)
        files[f"package/{name}.png"] = picture(sheet, "PNG")
    files["package/train_lables.json"] = json.dumps([y for part in parts[:-1] for y in part[2]]).encode()
    files["package/test_lables.json"] = json.dumps(parts[-1][2]).encode()
    return files


def tiny_imagenet() -> tuple[dict[str, bytes], dict[str, int]]:
    """Two classes with two training images each and two validation images; each image's gray level by its name."""
    words, files, levels = ("n02", "n01"), {}, {}
    for i, word in enumerate(words):
        for j in range(2):
            name = f"tiny-imagenet-200/train/{word}/images/{word}_{j}.JPEG"
            levels[name] = 40 * (2 * i + j) + 20
            # One in gray, as some of the real ones are.
            shape = (64, 64) if (i, j) == (0, 1) else (64, 64, 3)
            files[name] = picture(np.full(shape, levels[name], np.uint8), "JPEG")
        files[f"tiny-imagenet-200/train/{word}/{word}_boxes.txt"] = b"n\t0\t0\t1\t1\n"
    for j, level in enumerate((200, 240)):
        files[f"tiny-imagenet-200/val/images/val_{j}.JPEG"] = picture(np.full((64, 64, 3), level, np.uint8), "JPEG")
    files["tiny-imagenet-200/test/images/test_0.JPEG"] = picture(np.zeros((64, 64, 3), np.uint8), "JPEG")
    files["tiny-imagenet-200/val/val_annotations.txt"] = b"val_0.JPEG\tn01\t0\t0\t9\t9\nval_1.JPEG\tn02\t0\t0\t9\t9\n"
    files["tiny-imagenet-200/wnids.txt"] = "\n".join(words).encode()
    return files, levels


def picture(array: Bytes, kind: str) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(array).save(stream, kind)
    return stream.getvalue()


def write_tar(path: Path, files: Mapping[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            item = tarfile.TarInfo(name)
            item.size = len(content)
            tar.addfile(item, io.BytesIO(content))
    return path


def write_zip(path: Path, files: Mapping[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def write_folder(path: Path, files: Mapping[str, bytes]) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path
