"""`make evidence`: every study is a part of it, says how long it takes, and what is done is not counted again."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rekindle.lab.settings import Run
from rekindle.lab.study import Study

ROOT = Path(__file__).parents[2]
TINY = """
# Two cores: 40 min
settings: [{base: digits, stream_options: {tasks: 2}}]
arms: [nothing, fire]
seeds: [9000, 9001]
"""


@pytest.fixture
def evidence(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("yaml")
    spec = importlib.util.spec_from_file_location("evidence", ROOT / "studies" / "evidence.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "evidence", module)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_every_study_is_a_part_and_says_how_long_it_takes(evidence: ModuleType) -> None:
    files = {path.stem for path in (ROOT / "studies").glob("*.yaml")}
    assert files == {*evidence.STUDIES, *evidence.AGENTS, "advice"}, "advice.yaml is run by benchmarks/advice.py"
    for name in evidence.STUDIES:
        assert 0 < evidence.minutes(name) <= 60, name
        Study.load(ROOT / "studies" / f"{name}.yaml").tuning_runs()
    for script in evidence.SCRIPTS.values():
        assert (ROOT / "benchmarks" / script.file).is_file()


def test_new_studies_have_seeds_of_their_own(evidence: ModuleType) -> None:
    """Those that were never used before are above 1,000, and no two studies share one."""
    seeds = [Study.load(ROOT / "studies" / f"{name}.yaml").seeds for name in evidence.STUDIES]
    fresh = [seed for each in seeds for seed in each if seed > 1000]
    assert len(fresh) == len(set(fresh)) >= 60


def test_what_is_done_is_not_counted(
    evidence: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "studies").mkdir()
    for name, more in {"a": "", "b": "", "c": "tune: true"}.items():
        (tmp_path / "studies" / f"{name}.yaml").write_text(TINY + more)
    monkeypatch.setattr(evidence, "HOME", tmp_path)
    monkeypatch.setattr(evidence, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(evidence, "PARTS", ("a", "b", "c"))
    assert evidence.left(["a"]) == [40]
    assert evidence.left(["a", "b"]) == [40, 40], "each has its own folder"
    assert evidence.left(["c"]) == [40]
    monkeypatch.setattr(evidence, "JOINED", ("b", "c"))
    assert evidence.left(["a", "b"]) == [40, 0], "its runs are those of the first"
    assert evidence.left(["a", "c"]) == [40, pytest.approx(40 * 20 / 24)], "16 for tuning and 4 chosen ones are left"

    def first(study: Study, run: Run) -> bool:
        return run.arm.name == "nothing" and run.arm.lr is None and run.seed == 9000

    monkeypatch.setattr(evidence, "settled", first)
    assert evidence.left(["a"]) == [30]
    monkeypatch.setattr("sys.argv", ["evidence.py", "--list", "a"])
    evidence.main()
    assert "30 min of it left" in capsys.readouterr().out

    file = evidence.loaded("a").store.path(evidence.loaded("b").runs()[0].identity)
    file.parent.mkdir(parents=True)
    file.write_text("{}\n")
    (file.parent / "other.jsonl").write_text("{}\n")
    evidence.share("a")
    assert [path.name for path in (tmp_path / "results" / "lab" / "b" / "runs").iterdir()] == [file.name]

    performed: list[str] = []
    monkeypatch.setattr(evidence, "perform", performed.append)
    monkeypatch.setattr("sys.argv", ["evidence.py", "a", "b"])
    evidence.main()
    said = capsys.readouterr().out
    assert performed == ["a", "b"] and "== a: 30 min on two cores; parts after it: 1, a moment" in said
    monkeypatch.setattr("sys.argv", ["evidence.py", "d"])
    with pytest.raises(SystemExit):
        evidence.main()


def test_a_script_is_done_until_its_file_changes(
    evidence: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "benchmarks").mkdir()
    script = tmp_path / "benchmarks" / "dawn.py"
    script.write_text("import sys; open('told', 'a').write('x')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evidence, "HOME", tmp_path)
    assert evidence.left(["dawn"]) == [20]
    evidence.perform("dawn")
    evidence.perform("dawn")
    assert evidence.left(["dawn"]) == [0] and Path("told").read_text() == "x"
    script.write_text(script.read_text() + "# changed\n")
    assert evidence.left(["dawn"]) == [20]
    script.write_text("raise SystemExit(3)\n")
    monkeypatch.setattr("sys.argv", ["evidence.py", "dawn"])
    with pytest.raises(SystemExit):
        evidence.main()
    assert evidence.left(["dawn"]) == [20], "what failed is not done"
