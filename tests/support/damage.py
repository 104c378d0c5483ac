"""Damaged checkpoints of every format, and a referee that judges what `rekindle fire` made of them.

The referee shares no code with the package: torch, safetensors and torch.distributed.checkpoint read what was written,
and a changed matrix must be √(out/in) times the polar factor, by its definition in float64.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import leftovers, save_dcp, save_sharded, small_model, stepped
from rekindle import plan
from rekindle.checkpoint import CheckpointError, fire_file

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 12}
LLAMA |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 10}
JOURNAL = ".out.rekindle-journal"


def llama() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = {f"self_attn.{n}_proj": (8, 8) for n in "qkvo"}
    shapes |= {"mlp.gate_proj": (12, 8), "mlp.up_proj": (12, 8), "mlp.down_proj": (8, 12)}
    named = {f"model.layers.0.{name}.weight": torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    norms = ("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm")
    named |= {f"{name}.weight": torch.ones(8) for name in norms}
    return named | {n: torch.randn(10, 8, generator=draw) for n in ("model.embed_tokens.weight", "lm_head.weight")}


def training_state(lightning: bool = False) -> dict[str, Any]:
    model = small_model(width=4)
    state = stepped(model, torch.optim.Adam(model.parameters())).state_dict()
    if lightning:
        more = {"epoch": 3, "optimizer_states": [state], "lr_schedulers": []}
        return {"pytorch-lightning_version": "2.0", "state_dict": model.state_dict(), **more}
    return {"model": model.state_dict(), "optimizer": state, "step": 7}


def _folder(path: Path, tensors: Mapping[str, Tensor]) -> None:
    path.mkdir()
    save_file(dict(tensors), path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(LLAMA), "utf-8")


def _planned(path: Path) -> None:
    save_file(small_model(width=4).state_dict(), path)
    plan(small_model(width=4)).save(path.with_name("plan.json"))


def _interrupted(path: Path) -> None:
    """A source beside the journal and the partial output of a job that was killed."""
    save_file(small_model(width=4).state_dict(), path)
    child = os.fork()
    if child == 0:
        stop: Any = lambda done, *_: os._exit(0) if done else None  # noqa: E731
        fire_file(path, path.with_name("out"), resume=True, scale="paper", progress=stop)
        os._exit(1)
    os.waitpid(child, 0)


# Format → how one is made at a path, and the files that may be damaged, relative to that path's folder.
FORMATS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "safetensors": (lambda path: save_file(small_model(width=4).state_dict(), path, metadata={"a": "b"}), ("in",)),
    "bfloat16": (lambda path: save_file(small_model(width=4).bfloat16().state_dict(), path), ("in",)),
    "torch": (lambda path: torch.save(small_model(width=4).state_dict(), path), ("in",)),
    "legacy": (
        lambda path: torch.save(small_model(width=4).state_dict(), path, _use_new_zipfile_serialization=False),
        ("in",),
    ),
    "training": (lambda path: torch.save(training_state(), path), ("in",)),
    "lightning": (lambda path: torch.save(training_state(True), path), ("in",)),
    "dcp": (
        lambda path: save_dcp({"model": small_model(width=4).state_dict()}, path),
        ("in/.metadata", "in/__0_0.distcp"),
    ),
    "dcp training": (lambda path: save_dcp(training_state(), path), ("in/.metadata", "in/__0_0.distcp")),
    "sharded": (
        lambda path: save_sharded(small_model(width=4).state_dict(), path),
        ("in/model.safetensors.index.json", "in/model-00001-of-00002.safetensors"),
    ),
    "config": (lambda path: _folder(path, llama()), ("in/config.json",)),
    "plan": (_planned, ("plan.json",)),
    "journal": (_interrupted, (JOURNAL,)),
    "gguf": (lambda path: path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + bytes(64)), ("in",)),
}


class Canary:
    """A pickle that runs code when it is loaded: it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def damaged(data: bytes, name: str, draw: random.Random, canary: Path) -> bytes:
    """One damage of one file: bytes as a bad disk leaves them, or fields as somebody clever sets them."""
    if data[:2] == b"PK" and draw.random() < 0.5:
        return _other_record(data, draw, canary)
    if name.endswith(".json") and draw.random() < 0.7:
        return json.dumps(_other_json(json.loads(data), draw)).encode()
    if data[8:9] == b"{" and draw.random() < 0.5:
        return _other_header(data, draw)
    if draw.random() < 0.03:
        return pickle.dumps({"a.weight": Canary(canary)}, protocol=2)
    return _other_bytes(data, draw)


def _other_bytes(data: bytes, draw: random.Random) -> bytes:
    new = bytearray(data)
    start = draw.randrange(len(new)) if draw.random() < 0.5 else draw.randrange(min(len(new), 600))
    length = draw.choice((1, 2, 8, 16, 64, 500))
    match draw.randrange(7):
        case 0:
            for _ in range(draw.randint(1, 6)):
                new[draw.randrange(len(new))] = draw.randrange(256)
        case 1:
            new[start] ^= 1 << draw.randrange(8)
        case 2:
            new[start : start + length] = bytes(len(new[start : start + length]))
        case 3:
            del new[start:]
        case 4:
            del new[start : start + length]
        case 5:
            new[start:start] = draw.randbytes(length)
        case _:
            other = draw.randrange(len(new))
            new[start : start + length] = new[other : other + length]
    return bytes(new)


def _other_record(data: bytes, draw: random.Random, canary: Path) -> bytes:
    """The archive written again, valid as a zip, with another content of one record."""
    out = io.BytesIO()
    try:
        source = zipfile.ZipFile(io.BytesIO(data))
    except (zipfile.BadZipFile, NotImplementedError):
        return _other_bytes(data, draw)
    names = source.namelist()
    chosen, way = draw.choice(names), draw.randrange(6)
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED if way == 5 else zipfile.ZIP_STORED) as archive:
        for name in names:
            content = source.read(name)
            if name == chosen:
                if way == 0:
                    content = content[: -draw.choice((1, 4, 8))]
                elif way == 1:
                    content += bytes(draw.choice((1, 8, 64)))
                elif way == 2:
                    continue
                elif name.endswith("data.pkl") and way == 3:
                    content = pickle.dumps({"a.weight": Canary(canary)}, protocol=2)
                elif content:
                    content = _other_bytes(content, draw)
            archive.writestr(name, content)
    return out.getvalue()


def _other_header(data: bytes, draw: random.Random) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    text = json.dumps(_other_json(json.loads(data[8 : 8 + length]), draw)).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


ODD: tuple[Any, ...] = (0, -1, 1, 2, 7, 2**31, 2**63, 10**30, 1.5, True, None, "", "../x", "F16", "I64", [], {}, [[[]]])


def _other_json(value: Any, draw: random.Random) -> Any:
    """The same JSON with one place changed."""
    inner = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not inner or draw.random() < 0.15:
        return draw.choice(ODD)
    key = draw.choice(inner)
    copy = dict(value) if isinstance(value, dict) else list(value)
    match draw.randrange(6):
        case 0:
            del copy[key]
        case 1 if isinstance(copy, dict):
            copy[str(draw.choice(ODD))] = copy.pop(key)
        case 2:
            copy[key] = copy[draw.choice(inner)]
        case _:
            copy[key] = _other_json(value[key], draw)
    return copy


class Case:
    """One damaged checkpoint in a folder of its own, fired at, and judged."""

    def __init__(self, kind: str, seed: int, folder: Path, templates: Path) -> None:
        self.kind, self.folder, self.draw = kind, folder, random.Random(f"{kind} {seed}")
        self.canary = folder.parent / "executed"
        shutil.copytree(templates / kind, folder, symlinks=True)
        name = self.draw.choice(FORMATS[kind][1])
        data = (folder / name).read_bytes()
        self.damage = damaged(data, name, self.draw, self.canary)
        (folder / name).write_bytes(self.damage)
        self.source, self.out = folder / "in", folder / "out"

    def judged(self) -> str:
        """ "" if all is well, else what is wrong; "refused" and "done" are counted by `outcome`."""
        before = _everything(self.folder, without=(JOURNAL, ".out.rekindle-partial"))
        planned = self.kind == "plan"
        options: dict[str, Any] = {"plan": self.folder / "plan.json"} if planned else {"scale": "paper"}
        self.outcome = "done"
        try:
            receipt = fire_file(self.source, self.out, resume=self.kind == "journal", **options)
        except CheckpointError as error:
            self.outcome = "refused"
            if "\n" in str(error) or len(str(error)) > 700:
                return f"an error of {len(str(error))} characters"
        if self.canary.exists():
            return "executed"
        after = _everything(self.folder, without=() if self.outcome == "done" else (JOURNAL, ".out.rekindle-partial"))
        left = {name: content for name, content in after.items() if not name.startswith("out")}
        if left != before:
            return f"the folder changed: {sorted(set(left) ^ set(before)) or 'bytes'}"
        if self.outcome == "refused":
            return "an output in spite of an error" if after != before else ""
        if self.kind != "journal" and leftovers(self.folder):
            return f"left behind: {leftovers(self.folder)}"
        return self._judge_output(receipt)

    def _judge_output(self, receipt: Any) -> str:
        try:
            new, new_state = contents(self.out)
        except BaseException as error:  # torch's CheckpointException is none of Exception
            return f"an output that cannot be read: {type(error).__name__}: {error}"[:300]
        old, old_state = contents(self.source)
        if old.keys() != new.keys():
            return f"other names: {sorted(old.keys() ^ new.keys())[:3]}"
        moved = {name for name in old if not _same(old[name], new[name])}
        changed = {name for name in receipt.changed if not _same(old[name], new[name])} | moved
        if moved - set(receipt.changed):
            return f"changed and not in the receipt: {sorted(moved - set(receipt.changed))[:3]}"
        named = {*receipt.changed, *receipt.skipped}
        if named != set(old) and self.kind != "plan":  # a plan need not know all
            return f"a receipt that does not name every tensor: {sorted(named ^ set(old))[:3]}"
        if self.kind != "plan":
            for name in changed:
                if why := not_projected(old[name], new[name]):
                    return f"{name}: {why}"
        if isinstance(old_state, Mapping) and "param_groups" not in old_state:  # torch would not load it
            said = any("neither this model's weights nor a torch optimizer's state" in note for note in receipt.notes)
            return "" if said else "the receipt does not say that a state was left as it was"
        return _judge_states(list(old), old_state, new_state, set(receipt.changed))


def _everything(folder: Path, without: tuple[str, ...] = ()) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in without)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _same(one: Tensor, other: Tensor) -> bool:
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and bytes(one.contiguous().flatten().view(torch.uint8).tolist()) == bytes(
        other.contiguous().flatten().view(torch.uint8).tolist()
    )


def contents(path: Path) -> tuple[dict[str, Tensor], Any]:
    """The weights of a checkpoint as other software reads them, and the state of the optimizer."""
    if path.is_dir() and (path / ".metadata").exists():
        from torch.distributed.checkpoint import FileSystemReader
        from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
        from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

        tree: Any = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _load_state_dict(tree, FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    elif path.is_dir():
        index = path / "model.safetensors.index.json"
        files = (
            sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
            if index.exists()
            else ["model.safetensors"]
        )
        return {name: value for file in files for name, value in load_file(path / file).items()}, None
    elif path.read_bytes()[8:9] == b"{":
        return load_file(path), None
    else:
        tree = torch.load(path, weights_only=True, map_location="cpu")
    tables = [value for value in tree.values() if isinstance(value, Mapping) and "param_groups" not in value]
    weights = tree.get("model", tree.get("state_dict", tables[0] if tables else tree))
    states = tree.get("optimizer", (tree.get("optimizer_states") or [None])[0])
    return {str(name): value.detach() for name, value in weights.items() if isinstance(value, Tensor)}, states


def _judge_states(names: list[str], old: Any, new: Any, changed: set[str]) -> str:
    """The optimizer's tensors are zero for weights that changed, and else as they were."""
    if not isinstance(old, Mapping):
        return ""
    for key, slots in old["state"].items():
        name = names[key] if isinstance(key, int) and key < len(names) else key
        for slot, value in slots.items():
            now = new["state"].get(key, {}).get(slot)
            if not isinstance(value, Tensor):
                continue
            if now is None or (name in changed and bool(now.any())):
                return f"the state {slot} of {name} was not reset"
            if name not in changed and not _same(value, now):
                return f"the state {slot} of {name} changed"
    return ""


def not_projected(old: Tensor, new: Tensor) -> str:
    """Why a matrix is not √(out/in) times the nearest isometry of another; "" if it is."""
    out, in_ = old.shape
    coarse = old.dtype.itemsize < 4
    weight, factor = old.double(), new.double() / (out / in_) ** 0.5
    weight = weight / weight.abs().max()
    gram = factor @ factor.T if out <= in_ else factor.T @ factor
    off = float(torch.linalg.matrix_norm(gram - torch.eye(len(gram), dtype=torch.float64))) / len(gram) ** 0.5
    if not off < (0.05 if coarse else 2e-3):
        return f"is no isometry: {off:.2g}"
    nuclear = float(torch.linalg.svdvals(weight).sum())
    share = float((factor * weight).sum()) / nuclear
    return "" if share > (0.98 if coarse else 0.998) else f"is not the nearest isometry: {share:.4f}"


def make_templates(folder: Path) -> None:
    for kind, (make, _) in FORMATS.items():
        (folder / kind).mkdir(parents=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make(folder / kind / "in")
