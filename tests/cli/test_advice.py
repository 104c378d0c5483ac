"""`rekindle probe` and `rekindle advise`: what a file or a setting brings, what is printed, written and refused."""

import html
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from command_line import one_line, run

MINE = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
with torch.no_grad():
    model[2].bias.fill_(-50.0)  # no unit of the second layer fires
batches = [(torch.randn(16, 8), torch.randint(4, (16,))) for _ in range(4)]
old_batches = batches[:2]
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE + "\nfrom rekindle.methods import FullReset\ncandidates = [FullReset()]\n", "utf-8")
    return path


def test_probe_tells_that_plasticity_is_lost(mine: Path, tmp_path: Path) -> None:
    result = run("probe", mine, "--steps", 80, "--seeds", 2, "--html", tmp_path / "probe.html")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("plasticity score 0.") and "plasticity is lost" in result.stdout
    page = (tmp_path / "probe.html").read_text("utf-8")
    assert "Plasticity of mine.py" in page and "<svg" in page and "http" not in page.replace("http-equiv", "")


def test_advise_says_what_to_call_and_its_json_makes_the_same_page(mine: Path, tmp_path: Path) -> None:
    result = run("advise", mine, "--steps", 80, "--workers", 1, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["command"] == "advise" and found["advice"]["answer"] == "apply"
    assert found["advice"]["chosen"] == "full-reset" and "FullReset" in found["advice"]["call"]
    assert found["advice"]["call"] in run("advise", mine, "--steps", 40, "--workers", 1).stdout  # Python, not options
    (tmp_path / "a.json").write_text(result.stdout, "utf-8")
    assert run("report", tmp_path / "a.json", "-o", tmp_path / "a.html").exit_code == 0
    page = (tmp_path / "a.html").read_text("utf-8")
    assert "Advice for mine.py" in page and "full-reset" in page
    plain = re.sub("</?span>", "", page)  # between which a long call breaks
    assert html.escape(found["advice"]["call"]).replace("&#x27;", "&#39;") in plain


def test_a_setting_is_learned_up_to_a_boundary_and_asked_there() -> None:
    small = ["--set", "stream_options.tasks=3", "--set", "stream_options.epochs=1", "--set", "stream_options.count=64"]
    result = run("advise", "digits", *small, "--steps", 20, "--seeds", 2, "--workers", 1, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["source"]["text"].startswith("digits, seed 0: the network after 2 of 3 tasks")
    names = [row["name"] for row in found["advice"]["rows"]]
    assert {"nothing", "fire", "lr:3", "he-reset"} <= set(names)
    result = run("probe", "digits", *small, "--boundary", 1, "--steps", 20, "--seeds", 2)
    assert result.exit_code == 0 and "steps" in result.stdout
    assert "boundaries 1 to 2" in one_line(run("probe", "digits", *small, "--boundary", 7))


AGENT = """
import gymnasium
from stable_baselines3 import DQN

def make_env():
    return gymnasium.make("CartPole-v1")

agent = DQN("MlpPolicy", make_env(), learning_starts=20, buffer_size=500, seed=0).learn(200)
"""


def test_copies_of_an_agent_play(tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3")
    short = ["--set", "stream_options.steps=200", "--boundary", 1]
    few = ["--steps", 40, "--seeds", 2, "--workers", 1, "--json"]
    path = tmp_path / "mine.py"
    path.write_text(AGENT, "utf-8")
    for what in (["dqn-cartpole-quick", *short], [path]):
        result = run("advise", *what, *few, "--otherwise", "fire", "--html", tmp_path / "page.html", "--force")
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)["advice"]
        assert found["measure"] == "return" and found["steps"] == 40
        assert all(row["level"] > 0 for row in found["rows"])  # a pole stands for some steps
        assert "Return against steps" in (tmp_path / "page.html").read_text("utf-8")
        result = run("probe", *what, "--steps", 20, "--seeds", 2)
        assert result.exit_code == 0 and "steps" in result.stdout
    assert "give --steps" in one_line(run("advise", path))
    path.write_text(AGENT.replace(".learn(200)", ""), "utf-8")  # as one that was loaded: its buffers are empty
    assert "no stored returns" in one_line(run("probe", path))
    assert run("advise", path, "--steps", 20, "--seeds", 1, "--workers", 1).exit_code == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("batches = []", "does not define model"),
        ("model = 3\nbatches = []\nmodel = lambda: 3", "not a torch.nn.Module"),
        ("from torch import nn\nmodel = nn.Linear(1, 1)", "does not define batches"),
        ("from torch import nn\nmodel = nn.Linear(1, 1)\nbatches = 3", "holds no batches"),
    ],
)
def test_what_a_file_lacks_is_said_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "poor.py"
    path.write_text(text, "utf-8")
    assert words in one_line(run("advise", path))


def test_bad_input_is_one_line(tmp_path: Path, mine: Path) -> None:
    assert "there is no file" in one_line(run("probe", tmp_path / "none.py"))
    assert "did you mean" in one_line(run("advise", "digitz"))
    assert "none of the candidates: nothing, full-reset" in one_line(run("advise", mine, "--otherwise", "fires"))
    assert "not a time" in one_line(run("advise", mine, "--budget", "soon"))
    assert "for settings" in one_line(run("advise", mine, "--boundary", 2))
    (tmp_path / "model.pt").write_bytes(b"")
    assert "not a .py file" in one_line(run("probe", tmp_path / "model.pt"))


def test_control_c_stops_advise_and_its_processes(mine: Path) -> None:
    """All processes of the group hear it, as in a terminal; one line, and exit code 130."""
    mine.write_text(MINE + "\nimport pathlib\npathlib.Path(__file__).with_suffix('.begun').touch()\n", encoding="utf-8")
    long = ["--steps", "10000000", "--budget", "10m", "--workers", "2"]  # it is still at work when the signal comes
    command = [sys.executable, "-m", "rekindle", "advise", str(mine), *long]
    began = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not mine.with_suffix(".begun").exists() and began.poll() is None:
        time.sleep(0.1)
    time.sleep(1.0)
    os.killpg(began.pid, signal.SIGINT)
    out, err = began.communicate(timeout=120)
    *progress, last = err.splitlines()
    assert began.returncode == 130 and out == "" and last == "stopped"
    assert all(line.startswith("advise") for line in progress)  # plain lines, every five seconds
    with pytest.raises(ProcessLookupError):
        os.killpg(began.pid, 0)
