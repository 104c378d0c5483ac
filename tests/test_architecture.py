"""The rooms of the house: imports point one way, never in a circle, and documented import paths work.

Lazy imports and those for type checkers count too: whoever reads a module has to know what it leans on.
"""

from __future__ import annotations

import ast
import pkgutil
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

SRC = Path(__file__).parents[1] / "src"
# From what knows least to what knows most. A package imports only what stands before it, or itself.
ORDER = [
    "extras",
    "spelling",
    "tables",
    "files",
    "report",
    "isolation",
    "engine",
    "measures",
    "blocks",
    "recording",
    "sharding",
    "optimizers",
    "initial",
    "projection",
    "diagnosis",
    "monitoring",
    "methods",
    "advice",
    "integrations",
    "checkpoint",
    "lab",
    "cli",
]
# Public names of things that live in the packages: nobody inside imports them.
PUBLIC = ["triggers", "sinks", "scales", "__main__"]


def modules() -> dict[str, Path]:
    found = {".".join(path.relative_to(SRC).with_suffix("").parts): path for path in SRC.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in found.items()}


def imported(path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of rekindle that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= (inside & known.keys()) or {node.module}
    return names & known.keys()


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


GRAPH = {name: imported(path, modules()) - {name, "rekindle"} for name, path in modules().items() if name != "rekindle"}


def test_every_module_is_in_a_room() -> None:
    assert {room(name) for name in GRAPH} <= {*ORDER, *PUBLIC}


def test_the_design_page_draws_the_same_picture() -> None:
    page = (SRC.parent / "docs" / "design.md").read_text("utf-8")
    drawn = re.findall(r"^\| `([a-z]+)/?` \|", page, flags=re.M)
    assert drawn == [name for name in ORDER if name in drawn] and set(drawn) >= {room(name) for name in GRAPH} - {
        *PUBLIC
    }


ONE_FILE_EACH = {"methods": "One file per paper", "cli": "Commands are in files of their names"}


@pytest.mark.parametrize("name", [name for name in ORDER if (SRC / "rekindle" / name).is_dir()])
def test_a_room_says_what_is_inside_what_it_may_import_and_where_to_start(name: str) -> None:
    said = " ".join(
        (ast.get_docstring(ast.parse((SRC / "rekindle" / name / "__init__.py").read_text("utf-8"))) or "").split()
    )
    inside = {module.split(".")[2] for module in GRAPH if room(module) == name and module.count(".") > 1}
    if ONE_FILE_EACH.get(name, "…") not in said:
        assert {module for module in inside if f"`{module}`" not in said} == set()
    sentence = re.search(r"([Mm]ay import [^.]+|imports no other package)", said)
    assert sentence is not None
    up_to = re.search(r"everything up to `(\w+)`", sentence[0])
    allowed = ORDER[: ORDER.index(up_to[1]) + 1] if up_to else re.findall(r"`(\w+)`", sentence[0])
    used = {room(other) for module, others in GRAPH.items() if room(module) == name for other in others}
    assert used - {*allowed, name, "", "extras", "spelling", "tables"} == set()
    start = re.search(r"Start reading at `([\w.]+)`", said)
    assert start is not None and is_there(f"rekindle.{name}.{start[1]}")
    assert f"`{start[1]}` |" in (SRC.parent / "docs" / "design.md").read_text("utf-8")  # the same place


def test_imports_point_one_way() -> None:
    rank = {name: place for place, name in enumerate(ORDER)}
    wrong = [
        f"{name} → {other}"
        for name, others in GRAPH.items()
        for other in others
        if room(name) in rank and rank.get(room(other), len(rank)) > rank[room(name)]
    ]
    assert not wrong


def test_no_module_imports_itself_by_a_detour() -> None:
    # `rekindle.blocks` is imported with each of its modules: what matters is what a module asks for by name.
    TopologicalSorter(GRAPH).prepare()


def test_a_class_name_means_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name)
    # Each trainer's callback has the same name in its own module, as users of several trainers expect.
    assert {name: found for name, found in places.items() if len(found) > 1 and name != "RekindleCallback"} == {}


REFERENCE = SRC.parent / "docs" / "reference.md"
PAGES = [*SRC.parent.glob("*.md"), *SRC.parent.glob("docs/**/*.md"), *SRC.parent.glob("examples/*.py")]
HISTORY = {"CHANGELOG.md", "LOG.md"}  # these name things that are gone


def named_in(page: Path) -> set[str]:
    """Every dotted name of rekindle in a page's text, and what its code imports from where."""
    text = page.read_text(encoding="utf-8")
    found = set(re.findall(r"\brekindle(?:\.[A-Za-z_]\w*)+\b(?!/)", text))
    for code in [text] if page.suffix == ".py" else re.findall(r"```python\n(.*?)```", text, flags=re.S):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rekindle":
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def is_there(name: str) -> bool:
    found = pkgutil.resolve_name("rekindle")
    for step in name.split(".")[1:]:
        path = f"{found.__name__}.{step}" if isinstance(found, ModuleType) else ""
        if not hasattr(found, step) and not (path and find_spec(path)):
            return False
        found = getattr(found, step) if hasattr(found, step) else pkgutil.resolve_name(path)
    return True


EXTRAS = ("scipy", "gymnasium", "stable_baselines3", "transformers", "lightning", "ignite", "peft")


@pytest.mark.skipif(not all(map(find_spec, EXTRAS)), reason="the laboratory or a trainer is not installed")
@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in HISTORY], ids=lambda page: page.name)
def test_what_the_pages_name_is_there(page: Path) -> None:
    assert [name for name in sorted(named_in(page)) if not is_there(name)] == []


DOCUMENTED = """
import rekindle; rekindle.fire, rekindle.plan, rekindle.health, rekindle.polar, rekindle.Monitor, rekindle.Schedule
rekindle.Plan, rekindle.Receipt, rekindle.Health, rekindle.Certificate, rekindle.Thresholds, rekindle.methods.ReDo
rekindle.probe, rekindle.advise, rekindle.Advice, rekindle.ProbeResult, rekindle.Keeper, rekindle.Advised
rekindle.sinks, rekindle.scales, rekindle.measures, rekindle.blocks, rekindle.triggers, rekindle.initial, rekindle.lab
rekindle.optimizers.register, rekindle.blocks.register, rekindle.checkpoint.fire_file
from rekindle import FIREConfig, FIREReinitializer, ReinitStats
from rekindle.projection import fire
from rekindle.diagnosis import Health, health
from rekindle.triggers import AnyOf, DormancyAbove, Plateau, Schedule
from rekindle.sinks import TensorBoardSink
from rekindle.checkpoint import fire_file, open_checkpoint
from rekindle.blocks import matrices, register
from rekindle.methods import DASH, FIRE, ReDo, ShrinkPerturb
from rekindle.lab.networks import network
from rekindle.lab.sources import Examples, Stream, Task, Text
from rekindle.lab.settings import Setting
from rekindle.lab.arms import ARMS, arms
from rekindle.lab.dawn import DAWN, DAWNConfig, DAWNLoss
""".strip().splitlines()


def test_the_root_has_few_names_and_the_reference_says_when_each_is_needed() -> None:
    rekindle = __import__("rekindle")
    assert len(rekindle.__all__) <= 24
    rows = re.findall(r"^\| `rekindle\.(\w+)` \| (.+) \|$", REFERENCE.read_text("utf-8"), flags=re.M)
    assert sorted(name for name, _ in rows) == sorted(rekindle.__all__)
    assert all(getattr(rekindle, name) is not None and when for name, when in rows)


def public(name: str) -> bool:
    """Whether a user may import it: a name of the root, or one that the reference documents by itself or its module."""
    rekindle = __import__("rekindle")
    documented = re.findall(r"^::: ([\w.]+)$", REFERENCE.read_text("utf-8"), flags=re.M)
    roots = {f"rekindle.{each}" for each in (*rekindle.__all__, *rekindle._MODULES, "__version__")}
    for module in rekindle._MODULES:
        roots |= {f"rekindle.{module}.{each}" for each in getattr(getattr(rekindle, module), "__all__", ())}
    return name in roots or any(name == each or name.startswith(f"{each}.") for each in documented)


def test_the_laboratory_imports_what_a_user_may_import() -> None:
    private = set()
    for path in (SRC / "rekindle" / "lab").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rekindle":
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                private |= {f"{path.name}: {name}" for name in names if not public(name)}
    assert private == set()


def test_documented_names_work_as_attributes_and_as_imports() -> None:
    pytest.importorskip("scipy", reason="the laboratory is not installed")
    for line in DOCUMENTED:
        exec(line, {} if "import" in line else {"rekindle": __import__("rekindle")})


def test_attributes_need_no_import_of_their_own() -> None:
    code = "import rekindle, sys; assert 'torch' not in sys.modules; rekindle.sinks, rekindle.triggers, rekindle.blocks"
    subprocess.run([sys.executable, "-c", code], check=True)


def named_in_code(path: Path) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Name)}


def test_the_base_owns_the_call_of_every_remedy() -> None:
    owners = [
        path.name
        for path in (SRC / "rekindle" / "methods").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name == "__call__"
    ]
    assert owners == ["remedy.py"]


@pytest.mark.parametrize("folder", ["lab", "monitoring"])
def test_whoever_applies_a_method_knows_none_by_its_class(folder: str) -> None:
    """A method says what it needs (`batches="all"`, `watches=True`, `period`); `lab.arms` has names only."""
    classes = {name for name in __import__("rekindle").methods.__all__ if name != "muon"}
    for path in (SRC / "rekindle" / folder).rglob("*.py"):
        if "views" not in path.parts and "results" not in path.parts:  # there FIRE is the name of an arm
            assert named_in_code(path) & classes == set(), path
