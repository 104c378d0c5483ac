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
    found = {f"{path.relative_to(SRC)}: {name}" for path in paths for name in creations(path.read_text())}
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
