"""What each command prints, writes and exits with."""

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import rekindle
from command_line import checkpoint, one_line, run, weights
from rekindle.blocks.layouts import matrices
from rekindle.checkpoint import comparison as stored
from rekindle.checkpoint.inspection import POINTS
from rekindle.cli.app import app
from rekindle.projection.planning import plan as make_plan

__all__ = ["checkpoint"]  # a fixture

COMMANDS = ("inspect", "plan", "fire", "compare", "probe", "advise", "rank", "polar", "report", "doctor", "demo", "lab")


# Help


def test_help_teaches() -> None:
    text = run("--help").stdout
    assert all(name in text for name in COMMANDS)
    assert "rekindle fire ./my-model -o ./my-model-fire" in text
    assert "Exit codes" in text


@pytest.mark.parametrize("command", COMMANDS[:-1])  # lab is a group, whose own commands have theirs
def test_each_command_has_an_example(command: str) -> None:
    result = run(command, "--help", COLUMNS="120")
    assert result.exit_code == 0
    assert f"rekindle {command} " in result.stdout.partition("Examples")[2]


def test_version() -> None:
    assert run("--version").stdout.strip() == f"rekindle {rekindle.__version__}"


def test_an_unknown_option_is_bad_input(checkpoint: Path) -> None:
    assert run("inspect", checkpoint, "--nonsense").exit_code == 2


# inspect


def test_inspect_agrees_with_a_float64_svd(checkpoint: Path) -> None:
    result = run("inspect", checkpoint, "--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    measured = data["health"]["weights"]
    stored = weights()
    assert set(measured) == {name for name in stored if name.endswith("weight")}
    for name, numbers in measured.items():
        w = stored[name].double()
        sigma = torch.linalg.svdvals(w)
        share = sigma / sigma.sum()
        assert numbers["effective_rank"] == pytest.approx(torch.exp(-(share * share.log()).sum()).item(), rel=1e-6)
        scaled = w / (w.shape[0] / w.shape[1]) ** 0.5
        gram = scaled @ scaled.T if w.shape[0] <= w.shape[1] else scaled.T @ scaled
        dfi = (gram - torch.eye(len(gram), dtype=torch.float64)).square().sum().item()
        assert numbers["dfi"] == pytest.approx(dfi, rel=1e-6)
        curve = data["spectra"][name]["before"]
        assert curve["k"] == 24 <= POINTS
        assert curve["mean"] == pytest.approx(sigma.tolist(), rel=1e-3)


def test_inspect_prints_every_layer_in_full_and_the_verdict(checkpoint: Path) -> None:
    result = run("inspect", checkpoint)
    assert all(name in result.stdout for name in weights() if name.endswith("weight"))
    assert "verdict: unknown: no sign of lost plasticity in the weights" in result.stdout


def test_json_is_alone_on_stdout(checkpoint: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    result = run("inspect", checkpoint, "--json", "--html", page)
    assert json.loads(result.stdout)["command"] == "inspect"
    assert str(page) in result.stderr.replace("\n", "")
    assert page.read_text("utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize(("fail_on", "code"), [("never", 0), ("act", 0), ("watch", 1)])
def test_fail_on(tmp_path: Path, fail_on: str, code: int) -> None:
    worn = weights()
    worn["layers.0.attn.q_proj.weight"][:8] = 0
    save_file(worn, tmp_path / "worn.safetensors")
    result = run("inspect", tmp_path / "worn.safetensors", "--fail-on", fail_on)
    assert result.exit_code == code
    assert "33 % of the weight's rows are zero" in result.stdout


def test_nan_is_a_reason_to_act(tmp_path: Path) -> None:
    broken = weights()
    broken["layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(broken, tmp_path / "broken.safetensors")
    result = run("inspect", tmp_path / "broken.safetensors", "--fail-on", "act", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["health"]["broken"] == {
        "layers.1.mlp.up_proj.weight": "the weight holds NaN or Inf"
    }


def test_a_reference_makes_the_verdict_sure(checkpoint: Path, tmp_path: Path) -> None:
    later = weights()
    for name, value in later.items():
        if name.endswith("weight"):
            u, sigma, vh = torch.linalg.svd(value, full_matrices=False)
            later[name] = (u * (16 * sigma[0] * 0.5 ** torch.arange(len(sigma)))) @ vh
    save_file(later, tmp_path / "later.safetensors")
    arguments = ("inspect", tmp_path / "later.safetensors", "--reference", checkpoint, "--fail-on", "act", "--json")
    result = run(*arguments)
    health = json.loads(result.stdout)["health"]
    assert result.exit_code == 1
    assert health["sure"]
    assert {"weight rank", "weight norm"} <= {finding["sign"] for finding in health["findings"]}


def test_cheap_mode_finds_no_eigenvalue(checkpoint: Path) -> None:
    data = json.loads(run("inspect", checkpoint, "--cheap", "--json").stdout)
    assert data["spectra"] == {}
    assert "effective_rank" not in data["health"]["weights"]["layers.0.attn.q_proj.weight"]


# plan and fire


def test_plan_explains_itself_and_is_kept(checkpoint: Path, tmp_path: Path) -> None:
    result = run("plan", checkpoint, "--targets", "attention", "--scale", "paper", "-o", tmp_path / "plan.json")
    assert "layers.0.attn.q_proj.weight" in result.stdout
    assert "skipped: " in result.stdout
    kept = rekindle.projection.planning.Plan.load(tmp_path / "plan.json")
    assert [entry.name for entry in kept.selected] == [f"layers.{i}.attn.q_proj.weight" for i in range(2)]
    w = weights()["layers.0.attn.q_proj.weight"].double()
    dfi = (w @ w.T - torch.eye(24, dtype=torch.float64)).square().sum().item()
    assert kept.selected[0].dfi_now == pytest.approx(dfi, rel=1e-4)


def test_fire_projects_what_was_asked_and_nothing_else(checkpoint: Path, tmp_path: Path) -> None:
    before = checkpoint.read_bytes()
    out = tmp_path / "new.safetensors"
    result = run("fire", checkpoint, "-o", out, "--targets", "attention", "--scale", "0.5", "--json")
    assert result.exit_code == 0, result.stderr
    receipt = json.loads(result.stdout)["receipt"]
    assert receipt["totals"]["parameters"] == 2
    assert checkpoint.read_bytes() == before
    old, new = load_file(checkpoint), load_file(out)
    for name, value in new.items():
        if "q_proj.weight" in name:
            w = value.double()
            assert (w @ w.T / 0.25 - torch.eye(24, dtype=torch.float64)).square().sum() / 24 < 1e-6
        else:
            assert torch.equal(value, old[name])


def test_fire_by_a_plan_of_the_live_model(tmp_path: Path) -> None:
    """Groups and taps of a convolution are not in the file: without the plan nothing is touched."""
    torch.manual_seed(0)
    layers = (("conv", nn.Conv2d(4, 8, 3, groups=2)), ("flat", nn.Flatten()), ("classifier", nn.Linear(8, 3)))
    net = nn.Sequential(OrderedDict(layers))
    file, out = tmp_path / "net.pth", tmp_path / "new.pth"
    torch.save(net.state_dict(), file)
    make_plan(net).save(tmp_path / "plan.json")
    refused = one_line(run("fire", file, "-o", out))
    assert "groups of a convolution" in refused
    assert "--plan" in refused
    measured = json.loads(run("inspect", file, "--plan", tmp_path / "plan.json", "--json").stdout)["health"]
    assert measured["weights"]["conv.weight"]["matrices"] == 18
    assert run("fire", file, "-o", out, "--plan", tmp_path / "plan.json").exit_code == 0
    reference = rekindle.projection.firing.fire(net)
    assert reference.changed == ("conv.weight", "classifier.weight")
    torch.testing.assert_close(torch.load(out, weights_only=True), dict(net.state_dict()), rtol=1e-5, atol=1e-6)


def test_a_model_of_the_user_shows_how_tensors_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mynet.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3))\n", "utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    torch.save({"0.weight": torch.randn(8, 4, 3, 3), "0.bias": torch.zeros(8)}, tmp_path / "net.pt")
    data = json.loads(run("inspect", tmp_path / "net.pt", "--model", "mynet:build", "--json").stdout)
    assert data["health"]["weights"]["0.weight"]["matrices"] == 9
    assert "MODULE:NAME" in one_line(run("inspect", tmp_path / "net.pt", "--model", "mynet"))
    assert "no_such" in one_line(run("inspect", tmp_path / "net.pt", "--model", "mynet:no_such"))


def test_fire_refuses_to_overwrite(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "new.safetensors"
    out.write_text("precious", "utf-8")
    assert "force" in one_line(run("fire", checkpoint, "-o", out))
    assert out.read_text("utf-8") == "precious"
    assert run("fire", checkpoint, "-o", out, "--force").exit_code == 0
    one_line(run("fire", checkpoint, "-o", checkpoint, "--force"))
    assert "where to" in one_line(run("fire", checkpoint))
    assert run("fire", checkpoint, "--in-place").exit_code == 0
    torch.testing.assert_close(load_file(checkpoint), load_file(out))


def test_fire_page_shows_before_and_after(checkpoint: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    result = run("fire", checkpoint, "--in-place", "--scale", "paper", "--html", page, "--json")
    data = json.loads(result.stdout)
    before, after = data["health"]["weights"], data["after"]["weights"]
    name = "layers.0.attn.q_proj.weight"
    assert before[name]["effective_rank"] < 23
    assert after[name]["effective_rank"] == pytest.approx(24, abs=1e-2)
    assert data["spectra"][name]["after"]["mean"] == pytest.approx([1.0] * 24, abs=1e-3)
    assert "nearest isometries" in page.read_text("utf-8")


# compare


def test_compare_says_what_changed(checkpoint: Path, tmp_path: Path) -> None:
    other = weights()
    other["layers.0.attn.q_proj.weight"] *= 1.5
    save_file(other, tmp_path / "other.safetensors")
    data = json.loads(run("compare", checkpoint, tmp_path / "other.safetensors", "--json").stdout)
    changes = {change["name"]: change for change in data["changes"]}
    moved = changes.pop("layers.0.attn.q_proj.weight")
    assert moved["drift"] == pytest.approx(0.5, rel=1e-6)
    assert moved["frame"] == pytest.approx(1, abs=1e-4)
    assert moved["angle_out"] == pytest.approx(0, abs=1e-4)
    assert all(change["sfe"] == 0 for change in changes.values())
    text = run("compare", checkpoint, tmp_path / "other.safetensors").stdout
    assert "1 of 4 blocks changed, 3 identical bit for bit" in text


def test_compare_after_fire_keeps_the_frame_and_finds_the_old_file_tired(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "new.safetensors"
    assert run("fire", checkpoint, "-o", out, "--targets", "all", "--include", "*weight").exit_code == 0
    data = json.loads(run("compare", checkpoint, out, "--json").stdout)
    assert data["tired"]["which"] == "A"
    for change in data["changes"]:
        assert change["frame"] == pytest.approx(1, abs=1e-3)
        assert change["angle_out"] is None, "an isometry has no leading directions"


def test_compare_of_two_different_models(checkpoint: Path, tmp_path: Path) -> None:
    save_file({"b.weight": torch.eye(3)}, tmp_path / "b.safetensors")
    assert "share no matrix" in one_line(run("compare", checkpoint, tmp_path / "b.safetensors"))


@pytest.mark.parametrize("shape", [(16, 40), (40, 16), (24, 24)])
def test_subspace_angles_agree_with_scipy(shape: tuple[int, int]) -> None:
    scipy = pytest.importorskip("scipy.linalg")
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(*shape, generator=generator, dtype=torch.float64)
    b = a + 0.3 * torch.randn(*shape, generator=generator, dtype=torch.float64)
    found = stored.change("w", matrices("out in")(shape)[0], a[None], b[None])
    span = min(shape) // 8
    assert found.span == span
    (ua, _, va), (ub, _, vb) = (np.linalg.svd(each.numpy(), full_matrices=False) for each in (a, b))
    for side, first, second in (("out", ua[:, :span], ub[:, :span]), ("in", va[:span].T, vb[:span].T)):
        angles = scipy.subspace_angles(first, second)
        assert getattr(found, f"angle_{side}") == pytest.approx(np.degrees(angles.max()), rel=1e-6)
        assert getattr(found, f"overlap_{side}") == pytest.approx((np.cos(angles) ** 2).mean(), rel=1e-6)
    qa, qb = ua @ va, ub @ vb
    assert found.frame == pytest.approx((qa * qb).sum() / min(shape), rel=1e-4)


# polar, report, doctor


def test_polar_writes_the_isometry(tmp_path: Path) -> None:
    w = np.random.default_rng(0).normal(size=(5, 9))
    np.save(tmp_path / "w.npy", w)
    result = run("polar", tmp_path / "w.npy", "-o", tmp_path / "q.npy", "--json")
    u, sigma, vh = np.linalg.svd(w, full_matrices=False)
    np.testing.assert_allclose(np.load(tmp_path / "q.npy"), u @ vh, atol=1e-4)
    facts = json.loads(result.stdout)
    assert facts["nuclear"] == pytest.approx(sigma.sum(), rel=1e-4)
    assert facts["converged"]
    assert "force" in one_line(run("polar", tmp_path / "w.npy", "-o", tmp_path / "q.npy"))


@pytest.mark.parametrize("content", [np.array(["a"]), np.ones(3), np.array([[1, np.nan]]), np.ones((2, 2), complex)])
def test_polar_refuses_what_is_no_matrix(tmp_path: Path, content: np.ndarray[Any, Any]) -> None:
    np.save(tmp_path / "w.npy", content)
    assert "w.npy" in one_line(run("polar", tmp_path / "w.npy"))


def test_polar_reads_no_pickle(tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", np.array([{}], dtype=object), allow_pickle=True)
    one_line(run("polar", tmp_path / "w.npy"))


def test_report_from_kept_json(checkpoint: Path, tmp_path: Path) -> None:
    health = tmp_path / "health.json"
    health.write_text(run("inspect", checkpoint, "--json").stdout, "utf-8")
    (tmp_path / "plan.json").write_text(run("plan", checkpoint, "--json").stdout, "utf-8")
    page = tmp_path / "report.html"
    assert run("report", health, tmp_path / "plan.json", "-o", page).exit_code == 0
    text = page.read_text("utf-8")
    assert "Healthy" in text or "healthy" in text
    assert "Every planned parameter" in text
    assert "force" in one_line(run("report", health, "-o", page))
    (tmp_path / "foreign.json").write_text('{"a": 1}', "utf-8")
    assert "not a result of rekindle" in one_line(run("report", tmp_path / "foreign.json", "-o", tmp_path / "x.html"))
    assert not (tmp_path / "x.html").exists()


def test_doctor() -> None:
    facts = json.loads(run("doctor", "--json").stdout)
    assert facts["needed"]["torch"].startswith("2.")
    assert facts["check"]["ok"]
    assert "torch threads" in run("doctor").stdout


def test_doctor_says_how_to_get_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from rekindle.cli import doctor

    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "pandas" else "1")
    assert 'pip install "torch-rekindle[report]"' in run("doctor").stdout


def test_force_never_replaces_the_input(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    copy = folder / "model.safetensors"
    copy.write_bytes(before := checkpoint.read_bytes())
    for words in (
        ("inspect", checkpoint, "--html", checkpoint),
        ("plan", checkpoint, "-o", checkpoint),
        ("compare", copy, checkpoint, "--html", checkpoint),
        ("fire", folder, "-o", tmp_path / "out", "--html", copy),
        ("fire", checkpoint, "-o", tmp_path / "out.html", "--html", tmp_path / "out.html"),
    ):
        assert "the input" in (line := one_line(run(*words, "--force"))) or "both" in line
    assert checkpoint.read_bytes() == copy.read_bytes() == before
    page = folder / "report.html"
    page.write_text("old", "utf-8")
    assert run("inspect", folder, "--html", page, "--force").exit_code == 0


def test_fire_asks_where_the_weights_do_not_call_for_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "model-fire.safetensors"
    refused = run("fire", checkpoint, "-o", out, asked=True)
    assert refused.exit_code == 2 and "--yes does it all the same" in " ".join(refused.stderr.split())
    assert "verdict of the weights: unknown" in refused.stderr
    monkeypatch.setattr("rekindle.cli.fire.on_terminal", lambda: True)
    for answer, code in (("n", 1), ("", 1), ("y", 0)):
        assert not out.exists()
        done = CliRunner().invoke(app, ["fire", str(checkpoint), "-o", str(out)], input=f"{answer}\n")
        assert done.exit_code == code, done.output
    assert out.exists()
