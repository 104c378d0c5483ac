"""open_checkpoint(): what a path holds, whatever its format, and how a plan's names fit a file's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from rekindle.blocks.names import state_cleaner
from rekindle.checkpoint.folders import (
    OPTIMIZER_FILES,
    Companions,
    Weights,
    beside,
    check_index,
    companions,
    find_weights,
    read_json,
)
from rekindle.checkpoint.hub import HubFile, HubFolder, HubPlace, place_on_hub
from rekindle.checkpoint.parts import CheckpointError, FilePart, TensorMeta, clearly
from rekindle.checkpoint.safetensors_files import SafetensorsPart
from rekindle.projection.entries import PlanEntry
from rekindle.projection.planning import Plan
from rekindle.projection.planning import plan as make_plan
from rekindle.projection.receipt import Measuring

_DCP = ".metadata"
_FOREIGN = {
    b"GGUF": "it is GGUF: take the safetensors that it was made from",
    b"\x89HDF": "it is HDF5, as Keras writes it: load it there and save the weights as safetensors",
    b"\x93NUMPY": "it is a NumPy array: rekindle polar reads it",
    b"\x08": "it may be ONNX: take the torch checkpoint that it was exported from",
}


class Checkpoint:
    """A checkpoint of any format, read one tensor at a time; use it in a `with` statement.

    `names` are in file order. `config` is the content of the Hugging Face config.json beside the weights, `metadata`
    the safetensors metadata, `tied` maps a name to the one it shares memory with, `optimizer` sums up the optimizer
    states inside (None without any).
    """

    def __init__(
        self, path: Path, kind: str, parts: list[FilePart], folder: Path | None = None, weights: Weights | None = None
    ) -> None:
        self.path, self.format, self.parts, self.folder, self.weights = path, kind, parts, folder, weights
        self._owner = {name: part for part in parts for name in part.names}
        self.names = tuple(self._owner)
        self.metadata: dict[str, str] = {k: v for part in reversed(parts) for k, v in part.metadata.items()}
        # A header may list a name as dropped; where another file holds that tensor, it is a tensor of its own.
        self.tied = {
            name: owner for part in parts for name, owner in part.tied.items() if self._owner.get(name, part) is part
        }
        self.shared: dict[str, str] = {name: other for part in parts for name, other in part.shared.items()}
        # safetensors sorts its tensors, DCP merges what ranks send: only a single torch file keeps a model's order.
        self.registration_order = kind in ("torch", "lightning") and sum(bool(part.names) for part in parts) == 1
        self.config_note: str | None = None
        self.unread_state: str | None = None
        self.config = _config(folder if folder is not None else path.parent)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing: no file stays open between two reads."""

    def meta(self, name: str) -> TensorMeta:
        """(shape, dtype, bytes, shard) of a tensor, without reading it."""
        return self._part(name).meta(name)

    def read(self, name: str) -> Tensor:
        """One tensor."""
        with clearly(self.path, f"reading {name!r}"):
            return self._part(name).read(name)

    def write(self, name: str, value: Tensor) -> None:
        """Put a tensor into a checkpoint that was opened for writing."""
        self._part(name).write(name, value)

    def meta_tensors(self) -> dict[str, Tensor]:
        """Every tensor on the meta device, once if it is tied: what `rekindle.plan` needs, without any bytes."""
        return {
            name: torch.empty(self.meta(name).shape, dtype=self.meta(name).dtype, device="meta")
            for name in self.names
            if name not in self.tied
        }

    def tensors(self) -> Mapping[str, Tensor]:
        """Every tensor, read when it is asked for: for `rekindle.plan` with measures."""
        return _ReadOnDemand(self)

    def plan(self, *, config: object = None, measure: Measuring = "none", **options: Any) -> Plan:
        """The plan for this checkpoint, laid out by `config` or, without one, by its own.

        A config that describes another model, or that transformers does not know, is ignored if it is the checkpoint's
        own and refused if it was passed. `config_note` says so.
        """
        tensors = self.tensors() if measure != "none" else self.meta_tensors()
        self.config_note = None
        given = config is not None
        config = config if given else self.own_config()
        try:
            drafted = make_plan(tensors, config=config, measure=measure, **options)
        except Exception as error:
            if given or config is None or isinstance(error, CheckpointError):
                raise CheckpointError(f"{self.path}: {error}") from error
            try:
                drafted = make_plan(tensors, measure=measure, **options)
            except Exception as second:
                raise CheckpointError(f"{self.path}: {error}; and without the config: {second}") from second
            self.config_note = f"config.json was not used ({' '.join(str(error).split())[:300]})"
        entries = [self._unless_shared(entry) for entry in drafted.entries]
        return replace(drafted, entries=(*entries, *self._tied_entries(drafted)))

    @property
    def optimizer(self) -> dict[str, Any] | None:
        """What optimizer states the file holds: how many, of which class, and how they are matched to weights."""
        from rekindle.checkpoint.training_state import summary

        return summary(self)

    def files(self) -> tuple[Path, ...]:
        """Every file that holds tensors."""
        return tuple(file for part in self.parts for file in part.files())

    @property
    def size(self) -> int:
        """Bytes of the files that hold tensors."""
        sizes = (getattr(part, "size", None) for part in self.parts)
        return sum(
            sum(file.stat().st_size for file in part.files()) if size is None else size
            for part, size in zip(self.parts, sizes, strict=True)
        )

    def companions(self) -> Companions:
        """What else the folder holds."""
        if self.folder is None:
            return Companions([], {}, [])
        index = self.weights.listing if self.weights is not None else None
        return companions(self.folder, [*self.files(), *([index] if index is not None else [])])

    def _part(self, name: str) -> FilePart:
        if name not in self._owner:
            raise CheckpointError(f"{self.path}: there is no tensor {name!r}")
        return self._owner[name]

    def own_config(self) -> dict[str, Any] | None:
        """The folder's config if it names a model."""
        return self.config if self.config is not None and "model_type" in self.config else None

    def _unless_shared(self, entry: PlanEntry) -> PlanEntry:
        other = self.shared.get(entry.key)
        if other is None or entry.reason is not None:
            return entry
        why = f"shares memory with {other}, which would change with it; save them as separate tensors"
        return replace(entry, blocks=(), refusal=why, scales=(), references=())

    def _tied_entries(self, drafted: Plan) -> Iterator[PlanEntry]:
        known = {entry.name: entry for entry in drafted.entries}
        for name, owner in self.tied.items():
            if name in self._owner and name not in known and owner in known:
                reason = f"tied to {owner}, treated there"
                yield replace(known[owner], name=name, key=name, blocks=(), refusal=reason, scales=(), references=())


def place_of(path: str | Path) -> Path:
    """The file or folder of a checkpoint: an index stands for its folder.

    >>> place_of("model/model.safetensors.index.json").name
    'model'
    """
    path = Path(path)
    return path.parent if path.name.endswith(".index.json") else path


def open_checkpoint(path: str | Path, *, writable: bool = False) -> Checkpoint:
    """Open safetensors (single, sharded, Hugging Face folder), torch (.pt, .pth, .bin, .ckpt) or DCP checkpoints.

    `hf://owner/name` is one on the Hugging Face Hub, read by ranges of bytes without a download (extra `hub`).
    Everything about the file is checked before a tensor can be read; a broken or hostile one is a `CheckpointError`.
    Pickles are read with `weights_only=True` only.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "model.pt")
    ...     torch.save({"a.weight": torch.ones(2, 3)}, file)
    ...     with open_checkpoint(file) as checkpoint:
    ...         checkpoint.format, checkpoint.names, checkpoint.read("a.weight").sum().item()
    ('torch', ('a.weight',), 6.0)
    """
    place = place_on_hub(path)
    if place is not None:
        return _open_on_hub(place, writable)
    path = place_of(path)
    with clearly(path, "opening it"):
        if beside(path, "replaced").is_dir():
            raise CheckpointError(
                f"{path}: a job that exchanged its files runs or was killed; the same command with --resume finishes "
                "it, any other fire with this output undoes it"
            )
        if path.is_dir():
            return _open_folder(path, writable)
        if not path.exists():
            raise CheckpointError(f"{path}: there is no such file or folder")
        if not path.is_file():
            raise CheckpointError(f"{path}: neither a file nor a folder")
        part = _open_file(path, writable)
        return Checkpoint(path, _kind(part), [part])


def _open_on_hub(place: HubPlace, writable: bool) -> Checkpoint:
    if writable:
        raise CheckpointError(f"{place}: what is on the Hub is read only: download it, and give its folder")
    folder = HubFolder(place)
    with clearly(str(place), "opening it"):
        parts: list[FilePart] = [SafetensorsPart(HubFile(folder, name)) for name in folder.weights()]
        opened = Checkpoint(Path(str(place)), "safetensors", parts)
        opened.config = folder.config()
        return opened


def _open_folder(folder: Path, writable: bool) -> Checkpoint:
    if (folder / _DCP).is_file():
        from rekindle.checkpoint.dcp_files import DcpPart

        return Checkpoint(folder, "dcp", [DcpPart(folder, writable=writable)], folder)
    weights = find_weights(folder)
    parts: list[FilePart] = [_open_file(path, writable) for path in weights.files]
    check_index(weights, parts)
    unread = None
    for path in (folder / name for name in OPTIMIZER_FILES if (folder / name).is_file()):
        from rekindle.checkpoint.torch_files import TorchPart

        try:
            parts.append(TorchPart(path, writable=writable, weights=False))
        except CheckpointError as error:
            unread = str(error)
    checkpoint = Checkpoint(folder, _kind(parts[0]), parts, folder, weights)
    checkpoint.unread_state = unread
    return checkpoint


def _open_file(path: Path, writable: bool) -> FilePart:
    with path.open("rb") as file:
        head = file.read(9)
    if head[:4] == b"PK\x03\x04" or (head[:1] == b"\x80" and head[8:9] != b"{"):
        from rekindle.checkpoint.torch_files import TorchPart

        return TorchPart(path, writable=writable)
    if path.suffix == ".safetensors" or head[8:9] == b"{":
        return SafetensorsPart(path, writable=writable)
    foreign = next((what for start, what in _FOREIGN.items() if head.startswith(start)), f"it begins with {head[:8]!r}")
    raise CheckpointError(f"{path}: neither a safetensors nor a torch file ({foreign})")


def _kind(part: FilePart) -> str:
    return "safetensors" if isinstance(part, SafetensorsPart) else getattr(part, "kind", "torch")


def _config(folder: Path) -> dict[str, Any] | None:
    file = folder / "config.json"
    if not file.is_file():
        return None
    try:
        return read_json(file)
    except CheckpointError:
        return None  # a config beside a file is a hint; a broken one is ignored


class _ReadOnDemand(Mapping[str, Tensor]):
    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._names = [name for name in checkpoint.names if name not in checkpoint.tied]

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._checkpoint._owner:
            raise KeyError(name)
        return self._checkpoint.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


_COMPUTED = "parametrized: the file holds its originals only; project the live model with rekindle.fire, and save that"


def match_plan(plan: Plan, checkpoint: Checkpoint) -> Plan:
    """The plan with every selected entry's key being a tensor of the checkpoint of the planned shape.

    A plan of a live model says `encoder.0.weight` where a Lightning checkpoint says `model.encoder.0.weight`: one
    prefix for all, on either side, is removed. Anything that does not fit is refused; a weight of which the file holds
    the originals of a parametrization is skipped.
    """
    names, clean = set(checkpoint.names), state_cleaner(checkpoint.names)
    plain = [entry for entry in plan.selected if not entry.parametrized]
    wanted = plain or [entry for entry in plan.selected if entry.name in names]
    if not wanted:
        why = f": {_COMPUTED}" if plan.selected else ""
        raise CheckpointError(f"{checkpoint.path}: the plan projects nothing in this file{why}")
    way = next((way for way in _ways(wanted[0], checkpoint) if all(way(e) in names for e in wanted)), None)
    if way is None:
        missing = next(e.name for e in wanted if e.name not in names and e.key not in names)
        raise CheckpointError(f"{checkpoint.path}: the plan's {missing!r} is not in the checkpoint")
    entries = []
    for entry in plan.entries:
        key = way(entry)
        if entry.parametrized and entry.reason is None and key not in names:
            entry = replace(entry, refusal=_COMPUTED)
        if entry.reason is None:
            if key in checkpoint.shared:
                other = checkpoint.shared[key]
                raise CheckpointError(
                    f"{checkpoint.path}: {key!r} shares memory with {other!r}, which would change with it; "
                    "save them as separate tensors"
                )
            shape = checkpoint.meta(key).shape
            if tuple(entry.shape) != shape:
                raise CheckpointError(f"{checkpoint.path}: {key!r} has shape {shape}, the plan says {entry.shape}")
            dtype = checkpoint.meta(key).dtype
            if not dtype.is_floating_point or dtype.itemsize == 1:
                raise CheckpointError(f"{checkpoint.path}: {key!r} is {dtype}, which cannot be projected")
        # A receipt names a weight as the model does, or as the file does where these are not the same name.
        alike = key == entry.name or clean(key) == entry.name or f".{key}".endswith(f".{entry.name}")
        alike = alike or entry.name.endswith(f".{key}") or entry.reason is not None
        entries.append(replace(entry, key=key, name=entry.name if alike else key))
    _check_twice(entries, checkpoint)
    return replace(plan, entries=tuple(entries))


def _ways(first: PlanEntry, checkpoint: Checkpoint) -> list[Callable[[PlanEntry], str]]:
    ways: list[Callable[[PlanEntry], str]] = [_key, lambda entry: entry.name]
    for name in checkpoint.names:
        if name.endswith(f".{first.name}"):
            ways.append(_with_prefix(name.removesuffix(first.name)))
        elif first.name.endswith(f".{name}"):
            ways.append(_without_prefix(first.name.removesuffix(name)))
    return ways


def _key(entry: PlanEntry) -> str:
    # The key of a parametrized weight is one of its originals, which is another tensor, maybe of the same shape.
    return entry.name if entry.parametrized else entry.key


def _with_prefix(prefix: str) -> Callable[[PlanEntry], str]:
    return lambda entry: prefix + entry.name


def _without_prefix(prefix: str) -> Callable[[PlanEntry], str]:
    return lambda entry: entry.name.removeprefix(prefix)


def _check_twice(entries: list[PlanEntry], checkpoint: Checkpoint) -> None:
    seen: dict[str, str] = {}
    for entry in entries:
        if entry.reason is not None:
            continue
        owner = checkpoint.tied.get(entry.key, entry.key)
        if owner in seen:
            raise CheckpointError(f"{checkpoint.path}: {entry.key!r} and {seen[owner]!r} are one weight: exclude one")
        seen[owner] = entry.key
