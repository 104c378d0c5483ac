"""One way to create a file: the package's own sources are read for any other."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "rekindle"
CREATING = {
    *("write_text", "write_bytes", "touch", "mkstemp", "mktemp", "mkdtemp", "NamedTemporaryFile"),
    *("save_file", "savefig", "to_csv", "to_parquet", "to_pickle", "copyfile", "copy2", "copytree", "mkfifo", "tofile"),
    *("symlink_to", "hardlink_to"),
}
# What takes a file that is open already, as these do; and links, which never replace anything.
ALLOWED = {
    "checkpoint/assembling.py: symlink_to",
    "checkpoint/torch_files.py: torch.save",
    "cli/polar.py: numpy.save",
    "integrations/application.py: torch.save",
    "integrations/transformers.py: torch.save",
    "lab/execution/store.py: open",  # into memory
    "lab/execution/store.py: to_parquet",
    "lab/settings.py: torch.save",
}


def creations(source: str) -> set[str]:
    """The calls in a program that may create a file."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    found = set()
    for call in calls:
        name = ast.unparse(call.func)
        last = name.rpartition(".")[2]
        words = [*call.args, *(keyword.value for keyword in call.keywords)]
        modes = [str(word.value) for word in words if isinstance(word, ast.Constant)]
        writes = any(set(mode) <= set("rwaxbt+") and set(mode) & set("wax") for mode in modes if mode)
        if name == "os.open" and "O_CREAT" in ast.unparse(call):
            found.add(name)
        elif name not in ("os.open", "os.fdopen") and last == "open" and writes:
            found.add("open")
        elif last in CREATING:
            found.add(last)
        elif name in ("torch.save", "numpy.save", "numpy.savez", "json.dump", "pickle.dump"):
            found.add(name)
    return found


def test_files_are_created_in_one_place() -> None:
    paths = [path for path in SRC.rglob("*.py") if path != SRC / "files.py"]
    found = {f"{path.relative_to(SRC)}: {name}" for path in paths for name in creations(path.read_text("utf-8"))}
    assert found == ALLOWED


@pytest.mark.parametrize(
    "line",
    [
        'open(path, "w")',
        'path.open(mode="ab")',
        'path.write_text("")',
        "tempfile.mkstemp()",
        "os.open(path, os.O_WRONLY | os.O_CREAT)",
        "torch.save({}, path)",
        'gzip.open(path, "xb")',
    ],
)
def test_the_reader_of_sources_sees(line: str) -> None:
    assert creations(line)
    assert not creations('open(path); path.open("rb"); zipfile.ZipFile(path); os.fdopen(3, "wb")')


def texts_in_the_encoding_of_the_machine(source: str) -> list[str]:
    """The calls in a program that read or write text without saying in which encoding."""
    found = []
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        last = name.rpartition(".")[2]
        if any(keyword.arg == "encoding" for keyword in call.keywords):
            continue
        words = [*call.args, *(keyword.value for keyword in call.keywords)]
        texts = [node.value for word in words for node in ast.walk(word) if isinstance(node, ast.Constant)]
        binary = any("b" in text and set(text) <= set("rwaxbt+") for text in texts if isinstance(text, str))
        opens = last in ("open", "fdopen") and name not in ("os.open", "tarfile.open", "gzip.open", "Image.open")
        whole = len(call.args) == {"read_text": 0, "write_text": 1}.get(last)
        if whole or (opens and not binary):
            found.append(ast.unparse(call))
    return found


ROOT = SRC.parents[1]
PROGRAMS = [path for folder in ("src", "studies", "benchmarks", "examples", "tests") for path in ROOT.glob(folder)]


@pytest.mark.parametrize("folder", PROGRAMS, ids=lambda path: path.name)
def test_text_is_read_and_written_in_a_named_encoding(folder: Path) -> None:
    """Windows' code pages and `LC_ALL=C` have no σ: there a page could not be written, nor read back."""
    files = {path: texts_in_the_encoding_of_the_machine(path.read_text("utf-8")) for path in folder.rglob("*.py")}
    assert {str(path): calls for path, calls in files.items() if calls} == {}, 'add "utf-8"'


@pytest.mark.parametrize("line", ["open(path)", 'path.open("w")', "path.read_text()", "path.write_text(text)"])
def test_the_reader_of_sources_sees_the_missing_encoding(line: str) -> None:
    assert texts_in_the_encoding_of_the_machine(line)
    named = 'open(p, encoding="utf-8"); p.open("rb"); p.read_text("utf-8"); p.write_text(t, "utf-8"); tarfile.open(p)'
    assert not texts_in_the_encoding_of_the_machine(named)
