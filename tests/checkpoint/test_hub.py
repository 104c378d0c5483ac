"""Checkpoints on the Hugging Face Hub, played by a server of ours that answers ranges of bytes and nothing more."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from command_line import one_line, run, weights
from rekindle.checkpoint import CheckpointError, inspect_file, open_checkpoint
from rekindle.checkpoint import hub as ours

constants = pytest.importorskip("huggingface_hub.constants", reason='pip install "torch-rekindle[hub]"')
COMMIT = "c" * 40


class Server(ThreadingHTTPServer):
    """Repositories as folders; every request for bytes is noted."""

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root, self.asked, self.ranges = root, list[tuple[str, int, int]](), True


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        about = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/?]+))?(?:\?.*)?", self.path)
        part = re.fullmatch(rf"/([^/]+/[^/]+)/resolve/{COMMIT}/([^?]+)", self.path)
        folder = self.server.root / (about or part)[1]  # type: ignore[index]
        if not folder.is_dir():
            self.answer(404, b"{}", **{"X-Error-Code": "RepoNotFound"})
        elif about and about[2] not in (None, "main", COMMIT):
            self.answer(404, b"{}", **{"X-Error-Code": "RevisionNotFound"})
        elif about:
            files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
            told = {"id": about[1], "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            self.answer(200, json.dumps(told).encode(), **{"Content-Type": "application/json"})
        elif part:
            self.bytes_of(folder / part[2])

    def bytes_of(self, path: Path) -> None:
        content = path.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None or not self.server.ranges:
            self.answer(200, content)
            return
        start, stop = int(asked[1]), min(int(asked[2]) + 1, len(content))
        self.server.asked.append((path.name, start, stop))
        self.answer(206, content[start:stop], **{"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"})

    def answer(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """`me/one` is a file with a config, `me/two` two shards with an index, `me/pickled` has nothing for us."""
    for name in ("one", "two", "pickled", "several"):
        (tmp_path / "me" / name).mkdir(parents=True)
    state = weights()
    save_file(state, tmp_path / "me/one/model.safetensors")
    (tmp_path / "me/one/config.json").write_text('{"hidden_size": 24}', "utf-8")
    names = list(state)
    shards = {"1.safetensors": names[:4], "2.safetensors": names[4:]}
    for shard, members in shards.items():
        save_file({name: state[name] for name in members}, tmp_path / "me/two" / shard)
        save_file({name: state[name] for name in members}, tmp_path / "me/several" / shard)
    listed = {"weight_map": {name: shard for shard, members in shards.items() for name in members}}
    (tmp_path / "me/two/model.safetensors.index.json").write_text(json.dumps(listed), "utf-8")
    torch.save(state, tmp_path / "me/pickled/pytorch_model.bin")
    made = Server(tmp_path)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{made.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    yield made
    made.shutdown()
    made.server_close()


@pytest.mark.parametrize("place", ["hf://me/one", "hf://me/one@main", "hf://me/two", "hf://me/one/model.safetensors"])
def test_a_repository_is_read_as_its_files_are(place: str, server: Server) -> None:
    state = weights()
    with open_checkpoint(place) as stored:
        assert set(stored.names) == set(state)
        for name, tensor in state.items():
            assert torch.equal(stored.read(name), tensor)
        assert (stored.config == {"hidden_size": 24}) == ("one" in place)
        assert stored.size == sum(path.stat().st_size for path in (server.root / place[5:11]).glob("*.safetensors"))


def test_only_what_is_asked_for_is_fetched(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "_FIRST", 64)
    with open_checkpoint("hf://me/one") as stored:
        name = stored.names[-1]
        header = sum(stop - start for file, start, stop in server.asked if file == "model.safetensors")
        server.asked.clear()
        stored.read(name)
    fetched = [stop - start for _, start, stop in server.asked]
    assert header < stored.size - 4 * sum(tensor.numel() for tensor in weights().values()) + 200
    assert fetched == [stored.meta(name).bytes]


def test_it_is_inspected_planned_and_compared_where_it_lies(server: Server, tmp_path: Path) -> None:
    here = inspect_file(server.root / "me/one").health.to_dict()
    there = json.loads(run("inspect", "hf://me/one", "--json").stdout)
    assert there["source"]["path"] == "hf://me/one"
    assert there["health"]["weights"] == here["weights"]
    assert "q_proj" in run("plan", "hf://me/two").stdout
    assert "0 of 4 blocks changed" in run("compare", server.root / "me/one", "hf://me/two").stdout


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("hf://me/nothing", "there is no such repository, or it is private"),
        ("hf://me/one@v9", "has no revision 'v9'"),
        ("hf://me/one/other.safetensors", "has no such file; it has config.json, model.safetensors"),
        ("hf://me/pickled", "no safetensors among pytorch_model.bin: download it"),
        ("hf://me/several", "which one is the model? 1.safetensors, 2.safetensors"),
        ("hf://one", "write it as hf://owner/name"),
    ],
)
def test_what_is_not_there_is_one_sentence(place: str, said: str, server: Server) -> None:
    assert said in " ".join(one_line(run("inspect", place)).split())


def test_without_a_network_and_without_ranges_it_is_one_sentence(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "download it first" in one_line(run("fire", "hf://me/one", "-o", tmp_path / "new.safetensors"))
    server.ranges = False
    with pytest.raises(CheckpointError, match="gives no parts of files: download it"):
        open_checkpoint("hf://me/one")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "the Hub cannot be reached" in one_line(run("inspect", "hf://me/one"))


def test_a_damaged_header_on_the_hub_is_refused(server: Server) -> None:
    path = server.root / "me/one/model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:8] + b"[" + content[9:])
    with pytest.raises(CheckpointError, match="no safetensors file"):
        open_checkpoint("hf://me/one")


def test_headers_alone_move_no_weight(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "_FIRST", 64)
    shown = run("inspect", "hf://me/one", "--headers").stdout
    assert "layers.1.mlp.up_proj.weight  48×24  float32  mlp-in  1 × 48×24" in shown and "8 tensors" in shown
    stored = json.loads(run("inspect", server.root / "me/one", "--headers", "--json").stdout)
    assert [row["tensor"] for row in stored["headers"]][:1] == [shown.splitlines()[1].split()[0]]
    moved = sum(stop - start for name, start, stop in server.asked if name.endswith(".safetensors"))
    assert moved < stored["source"]["bytes"] - 4 * stored["source"]["numbers"] + 200
