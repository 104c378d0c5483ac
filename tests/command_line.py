"""Running commands in this process, and the small checkpoint that they run on."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

pytest.importorskip("typer", reason='pip install "torch-rekindle[cli]"')
pytest.importorskip("rich", reason='pip install "torch-rekindle[cli]"')

from typer.testing import CliRunner, Result

from rekindle.cli.app import app


def run(*arguments: object, **environment: str) -> Result:
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
