"""For the reference: doctests as blocks of code, where Markdown alone would take `>>>` for nested quotes."""

from __future__ import annotations

from typing import Any

from griffe import Extension, Object


def fenced(text: str) -> str:
    """The text with every doctest, its output included, inside a fence; it ends at the next empty line.

    >>> print(fenced("Adds.\\n\\n>>> 1 + 1\\n2\\n\\nEnd."))
    Adds.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    <BLANKLINE>
    End.
    """
    lines: list[str] = []
    inside = False
    for line in [*text.splitlines(), ""]:
        if not inside and line.lstrip().startswith(">>>"):
            inside = True
            lines.append("```pycon")
        elif inside and not line.strip():
            inside = False
            lines.append("```")
        lines.append(line.strip() if inside and line.lstrip().startswith(">>>") else line)
    return "\n".join(lines[:-1])


class Doctests(Extension):
    """Fences the examples of every docstring before it is rendered."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called once for everything that was loaded."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
