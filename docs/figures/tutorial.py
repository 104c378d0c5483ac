"""The pictures and the notebook of docs/tutorial.md: the page is run as it is written.

python docs/figures/tutorial.py             # pictures and notebook
python docs/figures/tutorial.py --notebook  # the notebook alone, without running anything
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent
PAGE, NOTEBOOK = DOCS / "tutorial.md", DOCS / "tutorial.ipynb"
INSTALL = "%pip install -q git+https://github.com/rekindle-torch/rekindle"


def notebook(page: str) -> str:
    """The page as a notebook: its Python snippets are cells, what stands between them is text."""
    cells: list[dict[str, Any]] = [_code(INSTALL)]
    for at, part in enumerate(re.split(r"```python\n(.*?)```\n", page, flags=re.S)):
        text = re.sub(r"!!! warning\n    ", "**Warning.** ", part)
        text = re.sub(
            r"!\[.*?\]\(.*?\)\n|The same as a notebook:.*?\n", "", text
        )  # files that a notebook does not have
        text = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", text).strip()
        if at % 2:
            cells.append(_code(part.rstrip()))
        elif text:
            cells.append({"cell_type": "markdown", "metadata": {}, "source": _lines(text)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 4}
    return json.dumps(made, indent=1) + "\n"


def _code(source: str) -> dict[str, Any]:
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": _lines(source)}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def draw(page: str) -> None:
    """Run the page, and draw its two curves."""
    from rekindle.lab.views.plots import Line, curves

    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", page, flags=re.S):
        exec(compile(code, str(PAGE), "exec"), names)
    shown = {"nothing": names["curve"], "fire": names["after"]}
    for name, arms in {"symptom": ["nothing"], "cure": ["nothing", "fire"]}.items():
        lines = [Line(arm, list(range(1, len(shown[arm]) + 1)), [100 * value for value in shown[arm]]) for arm in arms]
        picture = curves(
            "Accuracy while learning each task, one run", lines, x="task", y="%", start=0.0, size=(760, 280)
        )
        (DOCS / "images" / f"tutorial-{name}.svg").write_text(picture.file(), encoding="utf-8")


def main() -> None:
    """The command."""
    page = PAGE.read_text("utf-8")
    NOTEBOOK.write_text(notebook(page), encoding="utf-8")
    if "--notebook" not in sys.argv[1:]:
        draw(page)


if __name__ == "__main__":
    main()
