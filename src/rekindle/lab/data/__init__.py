"""Real images for the laboratory, standardised and ready for a network.

    images = load("cifar-10", size=16, count=10_000, seed=0)

A set is read from its archive once; the pixels at the asked size are then kept beside the archives, so that every
later process loads them in a fraction of a second.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rekindle.lab.data import fetching
from rekindle.lab.data.archives import READERS, Raw
from rekindle.lab.data.fetching import Missing, fetch

__all__ = ["CLASSES", "Images", "Missing", "fetch", "load", "resize", "where"]

CLASSES = {"digits": 10, "fashion-mnist": 10, "mnist": 10, "cifar-10": 10, "cifar-100": 100, "tiny-imagenet": 200}

# Part of the cached files' names: change it whenever the same archive would give other bytes.
FORMAT = 1


@dataclass(frozen=True)
class Images:
    """A labelled image set: x (N, C, H, W) float32, each channel standardised by all training pixels; y (N,) int64."""

    name: str
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int


def load(
    name: str,
    *,
    size: int | None = None,
    count: int | None = None,
    test_count: int | None = None,
    seed: int = 0,
    folder: Path | None = None,
) -> Images:
    """The set at size × size pixels, its examples in an order drawn by the seed.

    `count` and `test_count` keep the first so many of that order: a smaller subset of one seed is part of a larger
    one. The mean and deviation are those of the whole training set at this size, whatever the count, so that subsets
    see the same inputs. A set that is not on this machine raises `Missing` with the command that gets it.

    >>> images = load("digits", count=1000)
    >>> images.x.shape, images.test_x.shape, images.classes
    (torch.Size([1000, 1, 8, 8]), torch.Size([360, 1, 8, 8]), 10)
    """
    if name not in CLASSES:
        raise ValueError(f"no image set is called {name!r}; there are {', '.join(CLASSES)}")
    for option, value in (("size", size), ("count", count), ("test_count", test_count)):
        if value is not None and value < 1:
            raise ValueError(f"{option} is {value}; it must be at least 1, or None for all")
    stored = _stored(name, size, folder)
    for option, value, there in (("count", count, stored["y"]), ("test_count", test_count, stored["test_y"])):
        if value is not None and value > len(there):
            raise ValueError(f"{option} is {value:,}, but {name} has only {len(there):,}")
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(stored["y"]), generator=draw)[:count]
    test_rows = torch.randperm(len(stored["test_y"]), generator=draw)[:test_count]
    mean, deviation = stored["mean"][:, None, None], stored["deviation"][:, None, None]

    def standardised(pixels: Tensor) -> Tensor:
        return pixels.to(torch.float32).sub_(mean).div_(deviation)

    return Images(
        name,
        standardised(stored["x"][rows]),
        stored["y"][rows],
        standardised(stored["test_x"][test_rows]),
        stored["test_y"][test_rows],
        CLASSES[name],
    )


def where() -> dict[str, str]:
    """Every set, images and texts: the path where it was found, or the command that gets it.

    >>> where()["digits"].endswith("digits.csv.gz")
    True
    """
    found = {}
    for name in fetching.KNOWN:
        try:
            found[name] = fetching.find(name).path
        except Missing as missing:
            found[name] = missing.command
    return found


def resize(pixels: Tensor, size: int) -> Tensor:
    """Bytes (N, C, H, W) averaged over the exact area that each new pixel covers, rounded to bytes again.

    >>> resize(torch.tensor([[[[0, 100], [200, 100]]]], dtype=torch.uint8), 1)
    tensor([[[[100]]]], dtype=torch.uint8)
    """
    if pixels.shape[-2:] == (size, size):
        return pixels
    rows, columns = _coverage(pixels.shape[-2], size), _coverage(pixels.shape[-1], size)
    # In parts, because the float copy of a whole set is four times its size.
    parts = [(rows @ part.to(torch.float32) @ columns.T).round_().to(torch.uint8) for part in torch.split(pixels, 4096)]
    return torch.cat(parts)


def _coverage(old: int, new: int) -> Tensor:
    """(new, old): the share of each new pixel that an old one covers; rows sum to one."""
    edges = torch.arange(new + 1, dtype=torch.float64) * old / new
    low, high = edges[:-1, None], edges[1:, None]
    start = torch.arange(old, dtype=torch.float64)
    overlap = (torch.minimum(high, start + 1) - torch.maximum(low, start)).clamp_min(0)
    return (overlap * new / old).to(torch.float32)


def _stored(name: str, size: int | None, folder: Path | None) -> dict[str, Tensor]:
    """Pixels in bytes at the asked size, labels, and the mean and deviation of training pixels; cached."""
    place = fetching.find(name, folder)
    cache = _cache_file(name, size, place, folder)
    if cache.exists():
        try:
            return load_file(cache)
        except (SafetensorError, OSError):
            pass  # a damaged cache is made again
    if size is None:
        raw = _read(name, place)
        arrays = {"x": raw.x, "y": raw.y, "test_x": raw.test_x, "test_y": raw.test_y}
        stored = {part: torch.from_numpy(array) for part, array in arrays.items()}
    else:
        stored = _stored(name, None, folder)
        stored |= {part: resize(stored[part], size) for part in ("x", "test_x")}
    stored["mean"], stored["deviation"] = _moments(stored["x"])
    _keep(stored, cache)
    return stored


def _read(name: str, place: fetching.Place) -> Raw:
    if place.format == "digits":
        return _digits()
    path = Path(place.path)
    fetching.verify(path, place.hash)
    return READERS[place.format](path, CLASSES[name])


def _digits() -> Raw:
    """scikit-learn's 8 × 8 digits; one fixed fifth is the test set, the same for every seed."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    # The set is ordered 0, 1, …, 9, 0, 1, …: every fifth would be zeros and fives only.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).numpy()
    # From 0–16 to 0–240, so that rounding after a resize costs nothing that can be seen.
    x, y = (pixels[order] * 15).astype(np.uint8).reshape(-1, 1, 8, 8), labels[order].astype(np.int64)
    return Raw(x[360:], y[360:], x[:360], y[:360], 10)


def _moments(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel from the counts of its 256 values: exact, and without a float copy."""
    values = torch.arange(256, dtype=torch.float64)
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in pixels.unbind(1)])
    share = counts.double() / counts.sum(1, keepdim=True)
    mean = share @ values
    variance = (share * (values - mean[:, None]) ** 2).sum(1)
    # A constant channel becomes zero instead of NaN.
    return mean.float(), torch.where(variance > 0, variance, 1.0).sqrt().float()


def _cache_file(name: str, size: int | None, place: fetching.Place, folder: Path | None) -> Path:
    path = Path(place.path)
    # The state of the files, so that an archive that was replaced is read anew; a folder's own time is not enough.
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    source = f"{path}|{states}|{place.format}|{FORMAT}"
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    return (folder or fetching.home()) / "ready" / f"{name}-{size or 'full'}-{digest}.safetensors"


def _keep(stored: dict[str, Tensor], cache: Path) -> None:
    """Written beside and renamed, so that another process sees all of it or nothing; a read-only folder is no error."""
    temporary = cache.with_name(f"{cache.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        save_file({key: value.contiguous() for key, value in stored.items()}, temporary)
        os.replace(temporary, cache)
        for older in cache.parent.glob(f"{cache.name.rpartition('-')[0]}-????????????.safetensors"):
            if older != cache:  # of an archive that was replaced since
                older.unlink()
    except (OSError, SafetensorError):
        with contextlib.suppress(OSError):
            temporary.unlink()
