"""rank(): the order in which checkpoints learn; and pages of every result."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import rekindle
from command_line import one_line, run

X = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
DATA = [(part, part[:, :4].argmax(1)) for part in X.split(16)]


def net(seed: int = 0, dead: float = 0.0) -> nn.Sequential:
    """A network of which this share of the hidden units never fires: the more, the less it learns."""
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
    with torch.no_grad():
        made[0].bias[: int(64 * dead)] = -100.0
    return made


def test_models_come_in_the_order_in_which_they_learn_and_stay_as_they_are() -> None:
    models = {"half": net(0, 0.9), "none": net(0, 1.0), "whole": net(0)}
    before = {name: copy.deepcopy(model.state_dict()) for name, model in models.items()}
    optimizer = torch.optim.Adam(models["half"].parameters(), lr=1e-2)
    state = torch.get_rng_state()
    found = rekindle.rank(models, DATA, steps=60, optimizer=optimizer, fresh=True, workers=1, progress=False)
    assert found.order[-2:] == ("half", "none") and set(found.order[:2]) == {"whole", "fresh"}
    assert found.best == found.order[0] and found.rows[-1].difference_interval[0] > 0
    assert torch.equal(state, torch.get_rng_state())
    for name, model in models.items():
        assert all(torch.equal(before[name][key], value) for key, value in model.state_dict().items())
    text = str(found)
    assert "half" in text and "clearly behind" in text and found.to_dict()["order"] == found.order


def test_equal_models_cannot_be_told_apart() -> None:
    found = rekindle.rank([net(), net()], DATA, steps=20, workers=1, progress=False)
    assert found.sentence == "0 learns best in this trial, but 1 cannot be told from it: more steps or seeds may."
    assert found.rows[1].difference == pytest.approx(0, abs=1e-6)


def test_what_cannot_be_ranked_says_why() -> None:
    with pytest.raises(ValueError, match="two models or more"):
        rekindle.rank([net()], DATA)
    with pytest.raises(ValueError, match="none of the models"):
        rekindle.rank([net(), net()], DATA, optimizer=torch.optim.Adam(net().parameters()))
    with pytest.raises(TypeError, match="it is called new_batches="):
        rekindle.rank([net(), net()], batches=DATA)  # type: ignore[call-arg]


def test_the_command_ranks_files(tmp_path: Path) -> None:
    for name, dead in (("a", 1.0), ("b", 0.0)):
        torch.save(net(0, dead).state_dict(), tmp_path / f"{name}.pt")
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "other.pt")
    torch.save(DATA, tmp_path / "data.pt")
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\n"
        "model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))\n"
        f"batches = torch.load({str(tmp_path / 'data.pt')!r})\n"
        "optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)\n",
        "utf-8",
    )
    files = [tmp_path / name for name in ("a.pt", "b.pt")]
    page = tmp_path / "rank.html"
    result = run("rank", *files, tmp_path / "mine.py", "--steps", 60, "--workers", 1, "--html", page)
    assert result.exit_code == 0 and result.stdout.startswith("Start from b.pt"), result.output
    assert "Where to start: mine.py" in page.read_text("utf-8")
    assert "does not fit the model" in one_line(run("rank", files[0], tmp_path / "other.pt", tmp_path / "mine.py"))
    assert "give two checkpoints or more" in one_line(run("rank", tmp_path / "mine.py"))


def test_every_result_is_a_page_and_shows_itself_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    options = {"optimizer": optimizer, "steps": 20, "progress": False}
    results = [
        rekindle.health(model, [DATA[0]]),
        rekindle.plan(model),
        rekindle.probe(model, DATA, seeds=2, **options),  # type: ignore[arg-type]
        rekindle.advise(model, DATA, candidates=["fire"], seeds=2, workers=1, **options),  # type: ignore[arg-type]
        rekindle.rank([model, net(1)], DATA, seeds=2, workers=1, **options),  # type: ignore[arg-type]
        rekindle.fire(model, optimizer),
    ]
    for each in results:
        page = each.to_html()
        assert page.startswith("<!doctype html>") and "http" not in page.replace("http-equiv", "")
        assert each._repr_html_().startswith("<iframe srcdoc=")

    def missing(self: object) -> str:
        raise ImportError("jinja2")

    monkeypatch.setattr("rekindle.report.showing.Page.to_html", missing)
    assert results[0]._repr_html_().startswith("<pre>Health")
