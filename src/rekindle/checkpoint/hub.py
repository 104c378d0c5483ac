"""A checkpoint on the Hugging Face Hub, read where it lies: `hf://owner/name`, at an @revision, or one /file of it.

Headers and tensors come as ranges of bytes, one tensor at a time; nothing is kept on the disk. The commit is looked up
once, so that all parts are of one version. Only safetensors: what a pickle holds is known when all of it was read.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from rekindle.checkpoint.byte_files import ByteFile
from rekindle.checkpoint.folders import LONGEST_JSON, shards_of
from rekindle.checkpoint.parts import CheckpointError
from rekindle.extras import require

SCHEME = "hf:"
_FIRST = 1 << 17  # nearly every header is shorter: one request
_MOST = 1 << 26  # bytes of one request
_TIMEOUT = 60.0
_PLACE = re.compile(r"hf:/{1,2}(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?(?:/(?P<file>.+))?")


class HubPlace(NamedTuple):
    """A repository at a revision, and one file of it if it was named."""

    repo: str
    revision: str | None
    file: str | None

    def __str__(self) -> str:
        """As it is given on the command line."""
        return f"hf://{self.repo}" + f"@{self.revision}" * bool(self.revision) + f"/{self.file}" * bool(self.file)


def place_on_hub(path: str | Path) -> HubPlace | None:
    """What a path of ours names on the Hub; None for a path of this machine.

    >>> place_on_hub(Path("hf://gpt2-lovers/tiny@v2")), place_on_hub("a/b.safetensors")
    (HubPlace(repo='gpt2-lovers/tiny', revision='v2', file=None), None)
    """
    text = path.as_posix() if isinstance(path, Path) else path
    if not text.startswith(SCHEME):
        return None
    found = _PLACE.fullmatch(text)
    if found is None:
        raise CheckpointError(f"{text}: write it as hf://owner/name, hf://owner/name@revision or hf://owner/name/file")
    return HubPlace(found["repo"], found["revision"], found["file"])


class HubFolder:
    """The files of a repository at one commit."""

    def __init__(self, place: HubPlace) -> None:
        hub = require("huggingface_hub", "hub", str(place))
        self.place, self._utils = place, require("huggingface_hub.utils", "hub", str(place))
        with self._clearly():
            about = hub.HfApi().model_info(place.repo, revision=place.revision)
        self.commit = about.sha
        self.names = sorted(each.rfilename for each in about.siblings or ())
        self._url: Callable[[str], str] = lambda name: hub.hf_hub_url(place.repo, name, revision=self.commit)

    def weights(self) -> list[str]:
        """The safetensors files that are the model: the one that was named, those of the index, or the only one."""
        here = [name for name in self.names if "/" not in name]
        if self.place.file is not None:
            if self.place.file not in self.names:
                raise CheckpointError(f"{self.place}: the repository has no such file; it has {_some(self.names)}")
            return [self.place.file]
        indices = [name for name in here if name.endswith(".safetensors.index.json")]
        if len(indices) == 1:
            listed = shards_of(f"{self.place}/{indices[0]}", self.json(indices[0]))
            missing = next((name for name in listed if name not in here), None)
            if missing is not None:
                raise CheckpointError(f"{self.place}/{indices[0]}: the shard {missing} is missing")
            return listed
        single = [name for name in here if name.endswith(".safetensors")]
        if len(single) == 1:
            return single
        if single:
            raise CheckpointError(f"{self.place}: which one is the model? {_some(single)}: add /FILE")
        raise CheckpointError(
            f"{self.place}: no safetensors among {_some(self.names)}: download it, and give its folder"
        )

    def config(self) -> dict[str, Any] | None:
        """The repository's config.json; None without one, or with a broken one."""
        try:
            return self.json("config.json") if "config.json" in self.names else None
        except CheckpointError:
            return None

    def json(self, name: str) -> dict[str, Any]:
        """A JSON object in a file of the repository."""
        data = HubFile(self, name)
        if data.size > LONGEST_JSON:
            raise CheckpointError(f"{data.path}: too large for a JSON file of a checkpoint")
        with data.opened() as file:
            try:
                found = json.loads(file.read())
            except ValueError as error:
                raise CheckpointError(f"{self.place}/{name}: not JSON: {error}") from None
        if not isinstance(found, dict):
            raise CheckpointError(f"{self.place}/{name}: not a JSON object")
        return found

    def part(self, name: str, start: int, stop: int) -> tuple[bytes, int]:
        """The bytes from `start` to before `stop` of a file, as far as it has them, and how long the file is."""
        asked = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        with self._clearly(name):
            headers = self._utils.build_hf_headers() | asked
            answer: Any = self._utils.get_session().get(self._url(name), headers=headers, timeout=_TIMEOUT)
            if answer.status_code != 416:
                self._utils.hf_raise_for_status(answer)
        told = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", answer.headers.get("content-range", ""))
        if answer.status_code != 206 or told is None or int(told[1]) != start:
            raise CheckpointError(f"{self.place}/{name}: the server gives no parts of files: download it")
        return cast(bytes, answer.content), int(told[3])

    @contextmanager
    def _clearly(self, name: str = "") -> Iterator[None]:
        """What may go wrong on the way, as one sentence."""
        where = f"{self.place}/{name}" if name else str(self.place)
        errors = self._utils
        try:
            yield
        except errors.GatedRepoError:
            raise CheckpointError(
                f"{where}: its owner grants access on request: ask there, then `hf auth login`"
            ) from None
        except errors.RepositoryNotFoundError:
            raise CheckpointError(
                f"{where}: there is no such repository, or it is private and you are not logged in (`hf auth login`)"
            ) from None
        except errors.RevisionNotFoundError:
            raise CheckpointError(f"{where}: the repository has no revision {self.place.revision!r}") from None
        except errors.EntryNotFoundError:
            raise CheckpointError(f"{where}: the repository has no such file") from None
        except errors.HFValidationError as error:
            raise CheckpointError(f"{where}: {error}") from None
        except Exception as error:  # of the library that makes the requests: another one before huggingface_hub 1.0
            why = " ".join(str(error).split())[:200] or type(error).__name__
            raise CheckpointError(
                f"{where}: the Hub cannot be reached ({why}); a folder that was downloaded before needs no network"
            ) from None


class HubFile(ByteFile):
    """A file of a repository as ranges of bytes, to be read only."""

    def __init__(self, folder: HubFolder, name: str) -> None:
        self.path, self.writable = Path(str(folder.place._replace(file=name))), False
        self._folder, self._name = folder, name
        self._first, self.size = folder.part(name, 0, _FIRST)

    @contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        """The file from its beginning; its first bytes are known already."""
        yield cast(IO[bytes], io.BufferedReader(_Ranges(self), 1))

    def fetch(self, start: int, length: int) -> bytes:
        """So many bytes, or fewer where one request has a limit."""
        stop = min(start + min(length, _MOST), self.size)
        if stop <= start:
            return b""
        if stop <= len(self._first):
            return self._first[start:stop]
        data, size = self._folder.part(self._name, start, stop)
        if size != self.size or len(data) != stop - start:
            raise CheckpointError(f"{self.path}: the server gave {len(data)} bytes where {stop - start} were asked for")
        return data


class _Ranges(io.RawIOBase):
    def __init__(self, file: HubFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._file.size)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._file.fetch(self._at, len(buffer))
        memoryview(buffer)[: len(data)] = data
        self._at += len(data)
        return len(data)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "") or "its files"
