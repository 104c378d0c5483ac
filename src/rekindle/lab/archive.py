"""A study as one file: its description and the rows of its finished runs, for keeping beside the text that cites them.

    pack(Study.load("results/factorial"), Path("docs/evidence/runs/factorial.tar.xz"))
    with unpacked(Path("docs/evidence/runs/factorial.tar.xz")) as folder:
        print(Study.load(folder).results())

Curves and times of tasks are left out, and numbers but the headline have five digits: no figure of a page needs more,
and the headline of tuning runs decides which rate is reported.
"""

from __future__ import annotations

import io
import json
import lzma
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rekindle import files
from rekindle.lab.study import Study

_LEFT_OUT = ("curve", "seconds", "remedy_seconds")


def pack(study: Study, path: Path) -> int:
    """Write what a study has finished, and what it was refused, to a .tar.xz; how many runs there are.

    The same runs give the same bytes.
    """
    contents = {"study.json": json.dumps(study.to_dict(), indent=1).encode()}
    for run in [*study.runs(), *study.tuning_runs(), *study.tuned_runs()]:
        record = study.store.read(run.identity)
        if record.state in ("finished", "refused"):
            lines = [json.dumps(_short(row, run.setting.headline)) + "\n" for row in record.rows]
            contents[f"runs/{run.identity}.jsonl"] = "".join(lines).encode()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in contents.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    files.write(path, lzma.compress(buffer.getvalue(), preset=9))
    return len(contents) - 1


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """The folder of a packed study, while it is needed; a folder is itself."""
    if path.is_dir():
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(path) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder)


def _short(row: dict[str, Any], headline: str) -> dict[str, Any]:
    if row["kind"] != "task":
        return row
    kept = {name: value for name, value in row.items() if name not in _LEFT_OUT}
    return {name: value if name == headline else _rounded(value) for name, value in kept.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value
