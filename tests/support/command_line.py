"""Running commands in this process, and the small checkpoint that they run on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

pytest.importorskip("typer", reason='pip install "torch-rekindle[cli]"')
pytest.importorskip("rich", reason='pip install "torch-rekindle[cli]"')

from typer.testing import CliRunner, Result

from rekindle.cli.app import app


def run(*arguments: object, asked: bool = False, **environment: str) -> Result:
    """A command in this process; `fire` does not ask, unless the test is about that."""
    if arguments[:1] == ("fire",) and not asked:
        arguments = (*arguments, "--yes")
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=environment, prog_name="rekindle")


def weights(seed: int = 0, layers: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for layer in range(layers):
        for name, out, in_ in (("attn.q_proj", 24, 24), ("mlp.up_proj", 48, 24)):
            found[f"layers.{layer}.{name}.weight"] = torch.randn(out, in_, generator=generator) / in_**0.5
            found[f"layers.{layer}.{name}.bias"] = torch.randn(out, generator=generator)
    return found


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(weights(), path)
    return path


def one_line(result: Result) -> str:
    """Bad input: exit code 2, nothing on stdout, one line on stderr."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stderr
    return lines[0]


def as_user(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "rekindle", *map(str, arguments), *["--yes"][: arguments[:1] == ("fire",)]]
    known = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(line, capture_output=True, text=True, env=known, timeout=120, check=False)


MODEL = """
import torch
from torch import nn
import helper_of_mine
def build():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
def batches():
    draw = torch.Generator().manual_seed(0)
    for _ in range(3):
        yield torch.randn(32, 6, generator=draw), torch.randint(3, (32,), generator=draw)
def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MODEL, "utf-8")
    (tmp_path / "helper_of_mine.py").write_text("", "utf-8")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    with torch.no_grad():
        net[0].bias[:10] = -100.0  # ten of sixteen neurons never answer
    torch.save(net.state_dict(), tmp_path / "net.pt")
    return tmp_path
