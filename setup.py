"""The page of the package: the README with links that lead somewhere from anywhere. All else is in pyproject.toml.

PyPI shows the page away from the repository and knows no GitHub syntax: targets get the address of the repository at
the tag of this version, and `> [!WARNING]` becomes a bold word.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def version() -> str:
    """The one place that says it is `rekindle.__version__`."""
    source = (ROOT / "src" / "rekindle" / "__init__.py").read_text("utf-8")
    return re.findall(r'^__version__ = "(.+)"', source, flags=re.M)[0]


def page(readme: str, repository: str, tag: str) -> str:
    """The README with absolute targets: pictures as files, all else as pages; code stays as it is.

    >>> page("[![a](b.svg)](d.md#e) [f](#g)", "https://h", "v1")
    '[![a](https://h/raw/v1/b.svg)](https://h/blob/v1/d.md#e) [f](#g)'
    """

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[2].endswith((".svg", ".png")) else "blob"
        return f"{link[1]}{repository}/{kind}/{tag}/{link[2]}"

    pieces = re.split(r"(^```.*?^```$)", readme, flags=re.S | re.M)
    for i in range(0, len(pieces), 2):
        text = re.sub(r"^> \[!(\w+)\]$", lambda kind: f"> **{kind[1].capitalize()}.**", pieces[i], flags=re.M)
        pieces[i] = re.sub(r"(\]\()(?!\w+:|#)([^)\s]+)", absolute, text)
    return "".join(pieces)


def main() -> None:
    """What setuptools runs."""
    from setuptools import setup

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    readme = (ROOT / "README.md").read_text("utf-8")
    setup(
        long_description=page(readme, project["urls"]["Source"], f"v{version()}"),
        long_description_content_type="text/markdown",
    )


if __name__ == "__main__":
    main()
