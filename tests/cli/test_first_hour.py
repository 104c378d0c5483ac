"""What a new user meets in the first hour: quick answers, honest verdicts, names that fit, messages that help."""

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import rekindle
from command_line import as_user, checkpoint, one_line, own, run, weights
from rekindle.cli import laboratory_names, options

__all__ = ["checkpoint", "own"]  # fixtures
ROOT = Path(__file__).parents[2]
UNBROKEN = {"break_long_words": False, "break_on_hyphens": False}


# Quick answers


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("inspect", "--help"), ("lab", "run", "--help")])
def test_help_and_version_import_neither_torch_nor_the_laboratory(arguments: tuple[str, ...]) -> None:
    assert heavy_modules(*arguments, also=("pydantic",)) == "heavy: []"  # typer's, a quarter of the time of help


def heavy_modules(*arguments: str, also: tuple[str, ...] = ()) -> str:
    code = (
        "import sys; from rekindle.cli import main\n"
        "sys.argv = ['rekindle', *sys.argv[1:]]\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        f"heavy = {{'torch', 'numpy', 'scipy', 'pandas', 'rekindle.lab', 'jinja2', *{also}}}\n"
        "print('heavy:', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def completed(words: str, **environment: str) -> list[str]:
    found = as_user(
        _REKINDLE_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(words.count(" ")), **environment
    )
    return found.stdout.split()


def test_completion_knows_targets_scales_settings_and_arms() -> None:
    assert completed("rekindle fire model.pt --targets attention") == ["attention", "attention.qk", "attention-output"]
    assert completed("rekindle plan model.pt --scale ne") == ["nearest"]
    assert completed("rekindle lab run random-l")[0] == "random-labels"
    assert completed("rekindle lab run digits -m nothing,fire-n")[:1] == ["nothing,fire-nearest"]
    assert completed("rekindle inspect mod") == []  # then the shell itself offers files


def test_completion_imports_neither_torch_nor_the_laboratory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_REKINDLE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "rekindle lab run digits -m fire")
    monkeypatch.setenv("COMP_CWORD", "5")
    assert heavy_modules() == "heavy: []"


def test_completion_is_up_to_date_with_the_library() -> None:
    from rekindle.engine.solving import Solver
    from rekindle.projection.targets import PRESETS

    assert set(PRESETS) <= set(options.TARGETS)
    assert get_args(options.Solver) == get_args(Solver)


def test_completion_is_up_to_date_with_the_laboratory_names() -> None:
    pytest.importorskip("sklearn")
    from rekindle.lab.catalog import catalog

    found = catalog()
    names = {"SETTINGS": [*found["settings"]], "ARMS": [*found["arms"]], "GROUPS": [*found["groups"], "all"]}
    names["DATA"] = [*found["data"]]
    if os.environ.get("REKINDLE_RENEW"):
        file = Path(laboratory_names.__file__)
        head = file.read_text(encoding="utf-8").partition("SETTINGS")[0]
        lines = (
            f'{key} = """\n{textwrap.fill(" ".join(value), 110, **UNBROKEN)}\n""".split()\n'
            for key, value in names.items()
        )
        file.write_text(head + "".join(lines), encoding="utf-8")
    for key, value in names.items():
        assert value == getattr(laboratory_names, key), "REKINDLE_RENEW=1 with this test writes the names anew"


# doctor


def test_doctor_lists_what_there_is() -> None:
    """Callbacks that a user can pass to a trainer, and none of the modules that they share."""
    found = json.loads(run("doctor", "--json").stdout)["integrations"]
    reference = (ROOT / "docs" / "reference.md").read_text("utf-8")
    named = set(re.findall(r"^::: rekindle\.integrations\.(\S+)", reference, flags=re.M))
    named = {"sb3.RekindleCallback" if name == "sb3" else name for name in named}  # the whole module has a page
    assert set(found) == named - {"application.Application", "attaching.Attachment", "agent_advice.advise_agent"}
    shown = run("doctor").stdout
    assert [line for line in shown.splitlines() if "integrations" in line] == [
        f"rekindle.integrations.{name}: {why or 'ok'}" for name, why in found.items()
    ]


# Verdicts


def test_weights_alone_are_never_called_healthy(tmp_path: Path) -> None:
    torch.manual_seed(0)
    mixed = {f"{i}.weight": torch.randn(8, 4, 3, 3) for i in range(6)} | {"out.weight": torch.randn(24, 24) / 5}
    torch.save(mixed | {"more.weight": torch.randn(24, 24) / 5}, tmp_path / "net.pt")
    text = run("inspect", tmp_path / "net.pt").stdout
    assert "verdict: unknown: no sign of lost plasticity in the weights" in text
    assert "activity not measured" in text and "weights read" in text
    assert "verdict: healthy" not in text
    page = tmp_path / "net.html"
    run("inspect", tmp_path / "net.pt", "--html", page)
    shown = page.read_text("utf-8")
    assert 'class="verdict unknown"' in shown and "no sign of lost plasticity in the weights" in shown
    assert "activity not measured" in shown


def test_the_next_call_that_a_report_prints_cures_what_it_found() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
    with torch.no_grad():
        model[2].bias[:40] = -10.0
    batches = [torch.randn(64, 20) for _ in range(2)]
    names = {"rekindle": rekindle, "model": model, "optimizer": torch.optim.Adam(model.parameters())}
    report = names["report"] = rekindle.health(model, batches)
    assert report.verdict == "act"
    following = str(report).splitlines()[-1].removeprefix("next: ").removesuffix(", then train")
    for call in following.split(", then "):
        exec(call, names)
    assert rekindle.health(model, batches).verdict == "healthy"
    torch.nn.init.constant_(model[0].weight, float("nan"))
    assert str(rekindle.health(model)).splitlines()[-1] == "next: restore an earlier checkpoint"


def test_fire_and_compare_say_that_the_function_has_changed(checkpoint: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    fired = run("fire", checkpoint, "-o", tmp_path / "new.safetensors", "--html", page)
    assert "the function has changed: train the network" in fired.stderr
    assert "no sign of lost plasticity in the weights before" in page.read_text("utf-8").lower()
    assert "train the network before it is used" in page.read_text("utf-8")
    both = run("compare", checkpoint, tmp_path / "new.safetensors", "--html", tmp_path / "both.html")
    assert "if nothing was trained between A and B, the function has changed" in both.stdout
    assert "train the network before it is used" in (tmp_path / "both.html").read_text("utf-8")


# Names of files


@pytest.mark.parametrize(("source", "output"), [("a.pt", "b.safetensors"), ("a.safetensors", "b.pt")])
def test_a_name_that_says_another_format_is_refused(tmp_path: Path, source: str, output: str) -> None:
    torch.save(weights(), tmp_path / "a.pt")
    save_file(weights(), tmp_path / "a.safetensors")
    line = one_line(run("fire", tmp_path / source, "-o", tmp_path / output))
    assert "the output has the same format: name it b" in line
    assert not (tmp_path / output).exists()


def test_a_folder_is_not_written_under_the_name_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save_file(weights(), tmp_path / "model" / "model.safetensors")
    assert "would be a folder" in one_line(run("fire", tmp_path / "model", "-o", tmp_path / "f.safetensors"))
    assert not (tmp_path / "f.safetensors").exists()


def test_plan_lists_instead_of_failing(tmp_path: Path) -> None:
    file, kept = tmp_path / "net.pt", tmp_path / "plan.json"
    torch.save({"conv.weight": torch.randn(8, 4, 3, 3), "norm.bias": torch.zeros(8)}, file)
    for more in ((), ("--json",), ("-o", kept)):
        result = run("plan", file, *more)
        assert result.exit_code == 0, result.output
        assert "conv.weight" in result.stdout and "norm.bias" in result.stdout
        assert "nothing to project; --include NAME" in result.stderr
    assert "projects nothing" in one_line(run("fire", file, "-o", tmp_path / "x.pt", "--plan", kept))


def test_convolutions_of_a_plain_file_are_read_with_one_group_and_said_to_be(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 4))
    torch.save(net.state_dict(), tmp_path / "net.pt")
    assert "1 convolution read with groups=1" in run("inspect", tmp_path / "net.pt").stderr
    listed = json.loads(run("plan", tmp_path / "net.pt", "--json").stdout)["entries"]
    assert "read with groups=1" in listed[0]["reason"]
    assert "groups=1" in one_line(run("fire", tmp_path / "net.pt", "-o", tmp_path / "new.pt"))
    result = run("fire", tmp_path / "net.pt", "-o", tmp_path / "new.pt", "--include", listed[0]["name"])
    assert result.exit_code == 0, result.output
    taps = torch.load(tmp_path / "new.pt", weights_only=True)["0.weight"].flatten(2).permute(2, 0, 1)
    gram = taps.mT @ taps
    torch.testing.assert_close(gram, gram[0, 0, 0] * torch.eye(3).expand_as(gram), rtol=1e-4, atol=1e-5)


def test_torchs_advice_to_run_code_is_never_passed_on() -> None:
    from rekindle.cli.terminal import _line

    advice = "Weights only load failed. Set weights_only=False to load it. Do so only if you trust the source."
    assert "weights_only" not in _line(RuntimeError(advice))


@pytest.mark.parametrize("act", ["open", "fire"])
def test_nor_in_python(tmp_path: Path, act: str) -> None:
    from rekindle.checkpoint import CheckpointError, fire_file, open_checkpoint

    torch.save({"model": nn.Linear(2, 2)}, tmp_path / "whole.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:200])
    for name in ("whole.pt", "cut.pt"):
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(tmp_path / name) if act == "open" else fire_file(tmp_path / name, tmp_path / "new.pt")
        assert "weights_only" not in str(caught.value)
    assert "weights_only" not in str(CheckpointError("a.pt: bad (Set weights_only=False to load it. Only if trusted)"))


def test_a_plan_says_that_what_is_not_installed_could_change_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With transformers a config shows more (MiniLM: 37 matrices against 36), so each command says what is missing."""
    names = {f"encoder.layer.0.attention.self.{part}.weight": torch.randn(8, 8) for part in ("query", "key", "value")}
    (tmp_path / "model").mkdir()
    save_file(names, tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "bert", "hidden_size": 8}', "utf-8")
    monkeypatch.setitem(sys.modules, "transformers", None)
    for command in (("plan",), ("inspect",), ("fire", "-o", tmp_path / "new")):
        said = run(command[0], tmp_path / "model", *command[1:])
        assert said.exit_code == 0, said.output
        assert "config.json was not used (reading a config needs transformers" in said.output, command


def test_hints_name_options_and_not_arguments(tmp_path: Path) -> None:
    torch.save(weights(), tmp_path / "net.pt")
    line = one_line(run("plan", tmp_path / "net.pt", "--targets", "no.such.layer"))
    assert "--targets no.such.layer" in line and "targets=" not in line and "include=" not in line
    assert "--reference" in run("inspect", tmp_path / "net.pt").stdout


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns: hints are broken over lines there."""
    for name in ("inspect", "fire"):
        monkeypatch.setattr(f"rekindle.cli.{name}.width", lambda: 80)


def plain(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.usefixtures("narrow")
def test_hints_name_options_in_a_narrow_terminal_too(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own)
    told = ("--model", "mine.py:build", "--data", "mine.py:batches")
    seen = {"health": run("inspect", "net.pt", *told).stdout, "plan": run("plan", "net.pt", "-t", "auto").stdout}
    seen["receipt"] = run("fire", "net.pt", "-o", "new.pt", "-t", "auto").stdout
    torch.save({"a.weight": torch.eye(4), "conv.weight": torch.ones(2, 1, 3, 3), "b.weight": torch.eye(4)}, "cnn.pt")
    seen["convolutions"] = run("plan", "cnn.pt").stdout
    seen["comparison"] = run("compare", "net.pt", "new.pt").stdout
    for name, text in seen.items():
        assert not re.search(r"\b(heads|config|biases|reference)=(?!'zero'\) )", plain(text)), (name, text)
        assert max(map(len, text.splitlines())) <= 90, text  # only what is to be copied is longer
    assert "(--heads tells otherwise)" in plain(seen["plan"]) and "(--heads tells otherwise)" in plain(seen["receipt"])
    assert "give --config, --model or --plan" in plain(seen["convolutions"])
    assert "or rekindle fire --biases zero" in plain(seen["health"])


@pytest.mark.usefixtures("narrow")
def test_names_in_a_narrow_terminal_tell_layers_apart(tmp_path: Path) -> None:
    parts = ("attention.self.key", "attention.self.query", "attention.output.dense", "intermediate.dense")
    names = [f"encoder.layer.{i}.{part}.weight" for i in (0, 11) for part in parts]
    save_file({name: torch.eye(8) for name in [*names, "embeddings.word.weight"]}, tmp_path / "a.safetensors")
    for command in ("inspect", "plan"):
        shown = run(command, tmp_path / "a.safetensors").stdout
        lines = [line.split()[0] for line in shown.splitlines() if re.match(r"(…|encoder)", line)]
        assert len(lines) == len(set(lines)) == len(names), shown


def test_the_next_command_follows_from_what_was_found(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What weights alone cannot cure is not answered with a projection of weights, and what is named cures it."""
    monkeypatch.chdir(own)
    told = ("--model", "mine.py:build", "--data", "mine.py:batches")
    line = next(each for each in run("inspect", "net.pt", *told).stdout.splitlines() if each.startswith("next: "))
    words = line.removeprefix("next: rekindle ").split()
    assert words == ["fire", "net.pt", *told[:2], "-o", "net-fire.pt", "--biases", "zero"]
    assert "2 biases zeroed" in run(*words).stdout
    assert "next: nothing to do" in run("inspect", "net-fire.pt", *told).stdout
    state = torch.load("net.pt", weights_only=True)
    state["0.weight"][0, 0] = float("nan")
    torch.save(state, "broken.pt")
    assert "next: restore an earlier checkpoint" in run("inspect", "broken.pt").stdout


# A user's own code


@pytest.mark.parametrize("loss", ["cross_entropy", "mine.py:loss"])
def test_activity_and_gradients_are_measured_from_the_shell(
    own: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    monkeypatch.chdir(own)
    plain = run("inspect", "net.pt", "--model", "mine.py:build")
    assert "no sign of lost plasticity in the weights" in plain.stdout
    assert "next: rekindle inspect net.pt --model mine.py:build --data" in plain.stdout
    result = run("inspect", "net.pt", "--model", "mine.py:build", "--data", "mine.py:batches", "--loss", loss, "--json")
    assert result.exit_code == 0, result.output
    health = json.loads(result.stdout)["health"]
    assert health["verdict"] == "act"
    assert health["whole"]["dormant_worst"] == pytest.approx(10 / 16)
    assert health["whole"]["gradient_norm"] > 0
    text = run("inspect", "net.pt", "--model", "mine.py:build", "--data", "mine.py:batches").stdout
    assert "verdict: act" in text
    assert text.strip().splitlines()[-1].startswith("next: rekindle fire net.pt --model mine.py:build")


def test_how_far_outputs_moved_is_measured_or_said_not_to_be(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own)
    unknown = "how far outputs moved was not measured (--model with --data measures it)"
    assert unknown in run("fire", "net.pt", "-o", "new.pt", "--html", "plain.html").stderr
    assert unknown in Path("plain.html").read_text(encoding="utf-8").replace("How", "how")
    assert unknown in run("compare", "net.pt", "new.pt").stdout
    told = ("--model", "mine.py:build", "--data", "mine.py:batches")
    fired = run("fire", "net.pt", "-o", "other.pt", *told, "--json", "--html", "page.html")
    assert fired.exit_code == 0, fired.output
    moved = json.loads(fired.stdout)["receipt"]["outputs_moved"]
    assert moved > 0 and unknown not in fired.stderr
    assert f"Outputs moved by {moved:.0%} of their norm" in Path("page.html").read_text(encoding="utf-8")
    both = run("compare", "net.pt", "other.pt", *told, "--json", "--html", "both.html")
    assert json.loads(both.stdout)["outputs_moved"] == pytest.approx(moved)
    assert f"Outputs moved by {moved:.0%}" in Path("both.html").read_text(encoding="utf-8")
    assert "--data needs --model" in one_line(run("compare", "net.pt", "new.pt", "--data", "mine.py:batches"))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "module.model."])
def test_names_of_wrappers_are_seen_through(own: Path, monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    monkeypatch.chdir(own)
    plain = torch.load("net.pt", weights_only=True)
    more = {} if prefix.startswith(("module.", "_orig_mod")) else {"loss.weight": torch.ones(3)}
    torch.save({prefix + name: value for name, value in plain.items()} | more, "wrapped.pt")
    result = run("inspect", "wrapped.pt", "--model", "mine.py:build", "--data", "mine.py:batches", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["health"]["whole"]["dormant_worst"] == pytest.approx(10 / 16)


def test_the_page_shows_what_neurons_do(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own)
    told = ("--model", "mine.py:build", "--data", "mine.py:batches")
    run("inspect", "net.pt", *told, "--html", "page.html")
    page = Path("page.html").read_text(encoding="utf-8")
    assert "<h2>Neurons</h2>" in page and "share that is never active" in page
    assert "FIRE with biases=" not in page and "rekindle fire --biases zero" in page
    assert "FIRE with biases=" not in run("inspect", "net.pt", *told).stdout
    run("inspect", "net.pt", "--html", "weights.html")
    assert "<h2>Neurons</h2>" not in Path("weights.html").read_text(encoding="utf-8")


def test_modules_of_the_current_folder_can_be_named(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own)
    assert run("plan", "net.pt", "--model", "mine:build").exit_code == 0


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("broken.py:build", "broken.py cannot be imported: No module named 'no_such_package_here'"),
        ("missing.py:build", "there is no file missing.py"),
        ("mine.py:nothing", "mine.py has no 'nothing'"),
        ("no_such_module_x:build", "there is no module 'no_such_module_x' here"),
        ("mine", "write it as FILE.py:NAME"),
    ],
)
def test_mistakes_in_a_users_code_are_called_so(
    own: Path, monkeypatch: pytest.MonkeyPatch, model: str, expected: str
) -> None:
    monkeypatch.chdir(own)
    (own / "broken.py").write_text("import no_such_package_here\n", "utf-8")
    assert expected in one_line(run("plan", "net.pt", "--model", model))


def test_an_import_error_in_a_study_is_the_users(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    (tmp_path / "mine.py").write_text("import no_such_package_here\n", "utf-8")
    line = one_line(run("lab", "run", tmp_path / "mine.py"))
    assert "no_such_package_here" in line and "mine.py" in line
    assert "laboratory needs" not in line


# In Python


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda m: rekindle.attach(m, "fire", every=3), "attach(model, optimizer, method)"),
        (lambda m: rekindle.fire(m, "adam"), "expected an optimizer or a list of them, got str"),
        (lambda m: rekindle.probe(m.state_dict(), []), "load a state dict into its model first"),
        (lambda m: rekindle.probe(m, torch.randn(8, 6)), "an iterable of batches"),
        (lambda m: rekindle.advise(m, 3), "an iterable of batches, such as [(inputs, targets), …], got a int"),
        (lambda m: rekindle.Schedule("fire", rekindle.triggers.Every(3)), "such as rekindle.methods.FIRE()"),
        (lambda m: rekindle.Schedule(rekindle.methods.FIRE(), "epoch"), "such as rekindle.triggers.Every(1000)"),
    ],
)
def test_natural_mistakes_are_told_what_to_pass(mistake: Callable[[nn.Module], object], words: str) -> None:
    with pytest.raises(TypeError, match=re.escape(words)):
        mistake(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (b"GGUF\x03", "it is GGUF"),
        (b"\x89HDF\r\n", "as Keras writes it"),
        (b"\x93NUMPY\x01", "rekindle polar reads it"),
    ],
)
def test_files_of_others_are_called_by_their_name(tmp_path: Path, start: bytes, words: str) -> None:
    (tmp_path / "a.bin").write_bytes(start + bytes(64))
    assert words in one_line(run("inspect", tmp_path / "a.bin"))


def test_what_the_demo_lacks_is_said_before_its_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    told = run("demo")
    assert told.exit_code == 2 and 'needs pyarrow: pip install "torch-rekindle[lab]"' in told.stderr
    assert "runs" not in told.stderr.replace("random", "")


def test_a_short_probe_names_options(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own / "asked.py").write_text("import mine\nmodel = mine.build()\nbatches = list(mine.batches())\n", "utf-8")
    monkeypatch.chdir(own)
    assert "give more --steps or --budget" in run("probe", "asked.py", "--steps", 2, "--seeds", 1).stdout
