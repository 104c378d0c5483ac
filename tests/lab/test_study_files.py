"""What a study can be loaded from, and what is said of a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.lab.execution.workers import Pool
from rekindle.lab.study import Study, seed_list


def test_yaml(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "mine.yaml"
    path.write_text(
        """
settings:
  - digits
  - {base: digits, name: faster, lr: 0.01, stream_options: {tasks: 3}}
arms: [nothing, solvers, {name: gentle, method: FIRE, options: {strength: 0.5}}]
seeds: [3, 4]
tune: true
""",
        "utf-8",
    )
    made = Study.load(path)
    assert made.name == "mine" and made.folder == Path("results/lab/mine") and made.tune and made.seeds == [3, 4]
    first, second = made.settings
    assert (second.name, second.lr) == ("faster", 0.01)
    assert second.stream_options == {**first.stream_options, "tasks": 3}, "options are added to those of the base"
    assert [arm.name for arm in made.arms] == ["nothing", "fire", "fire-10", "fire-5", "gentle"]
    other = Study.load(path, methods=["fire"], seeds=1, folder=tmp_path / "x", tune=False)
    assert (len(other.runs()), other.folder, other.tune) == (2, tmp_path / "x", False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- just a list", "must hold a mapping"),
        ("settings: [digits]\nseeds: 0", "at least one"),
        ("settings: [digits]\nsede: 3", "no field 'sede'"),
        ("settings: [digit]", "did you mean 'digits'"),
        ("arms: [fire]", "needs settings"),
        ("settings: [digits, digits]", "twice"),
        ("settings: [digits]\narms: [fyre]", "did you mean 'fire'"),
        ("settings: [digits]\ntune: true\nseeds: [100]", "are for tuning"),
        ("settings: [", "is not YAML"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(content: str, message: str, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "mine.yaml"
    path.write_text(content, "utf-8")
    with pytest.raises(ValueError, match=message):
        Study.load(path)


def test_other_ways_to_say_it_wrongly(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no study file"):
        Study.load("nowhere.yaml")
    with pytest.raises(FileNotFoundError, match="not the folder of a study"):
        Study.load(tmp_path)
    empty = tmp_path / "empty.py"
    empty.write_text("x = 1\n", "utf-8")
    with pytest.raises(ValueError, match="neither `study"):
        Study.load(empty)
    with pytest.raises(ValueError, match="workers must be at least 1"):
        Pool(0)
    with pytest.raises(ValueError, match="at least one"):
        seed_list(0)


def test_names_of_settings(tmp_path: Path) -> None:
    made = Study.load(["digits", "random-labels"], methods="main", seeds=[7], name="both")
    assert [s.name for s in made.settings] == ["digits", "random-labels"] and made.folder == Path("results/lab/both")
    assert made.seeds == [7] and made.arms[0].name == "nothing"


def test_settings_and_arms_may_be_given_by_name() -> None:
    made = Study("x", ["digits"], ["nothing", "solvers"], 2)  # type: ignore[list-item,arg-type]
    assert made.settings[0].batch == 16 and made.seeds == [0, 1]
    assert [arm.name for arm in made.arms] == ["nothing", "fire", "fire-10", "fire-5"]
    with pytest.raises(ValueError, match="did you mean 'nothing'"):
        Study("x", ["digits"], ["nothin"], [0])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("line", "kind", "message"),
    [
        (
            "import no_such_package",
            ImportError,
            r"mine\.py, line 2: ModuleNotFoundError: No module named",
        ),
        ("1 / 0", RuntimeError, r"mine\.py, line 2: ZeroDivisionError: division by zero"),
        ("raise ValueError('mine')", ValueError, r"mine\.py, line 2: ValueError: mine"),
        ("def", RuntimeError, r"mine\.py.*SyntaxError"),
    ],
)
def test_an_error_in_the_users_file_is_theirs(tmp_path: Path, line: str, kind: type[Exception], message: str) -> None:
    (tmp_path / "mine.py").write_text(f"import rekindle.lab\n{line}\n", "utf-8")
    with pytest.raises(kind, match=message) as caught:
        Study.load(tmp_path / "mine.py")
    assert not isinstance(caught.value, ModuleNotFoundError), "which would be read as a missing part of the laboratory"
