"""What a release needs: the tag, the package, CITATION.cff and the changelog name one version. Prints its notes.

python .ci/release.py v0.1.0
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def version() -> str:
    """The one place: `__version__` of the package."""
    source = (ROOT / "src/rekindle/__init__.py").read_text("utf-8")
    return re.findall(r'^__version__ = "(.+)"', source, flags=re.M)[0]


def notes(changelog: str, of: str) -> tuple[str, str]:
    """The day and the text of a version's section; empty where it has none.

    >>> notes("# Changelog\\n\\n## 0.2 (unreleased)\\n\\n- b\\n\\n## 0.1 (2026-01-01)\\n\\n- a\\n", "0.1")
    ('2026-01-01', '- a')
    """
    found = re.search(rf"^## {re.escape(of)} \((.+?)\)\n(.*?)(?=^## |\Z)", changelog, flags=re.S | re.M)
    return (found[1], found[2].strip()) if found else ("", "")


def faults(tag: str) -> list[str]:
    """What is in the way of a release under this tag."""
    ours, citation = version(), (ROOT / "CITATION.cff").read_text("utf-8")
    day, text = notes((ROOT / "CHANGELOG.md").read_text("utf-8"), ours)
    found = [] if tag == f"v{ours}" else [f"the tag is {tag}, the package is {ours}"]
    found += [] if f"\nversion: {ours}\n" in citation else [f"CITATION.cff is not of {ours}"]
    found += [] if text else [f"CHANGELOG.md has no section '## {ours} (day)'"]
    found += (
        [] if re.fullmatch(r"\d{4}-\d\d-\d\d", day) else [f"CHANGELOG.md calls {ours} {day or 'nothing'!r}, not a day"]
    )
    return found


def main() -> int:
    """Print the notes, or what is in the way."""
    wrong = faults(sys.argv[1])
    print("\n".join(wrong) if wrong else notes((ROOT / "CHANGELOG.md").read_text("utf-8"), version())[1])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
