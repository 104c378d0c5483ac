"""For the site: the first time that a page uses a word of the glossary, the word leads there."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

GLOSSARY = Path(__file__).parent.parent / "glossary.md"
# What is no running text: code, links, pictures, headings, HTML.
_APART = re.compile(
    r"```.*?```|`[^`]*`|!?\[[^\]]*\]\([^)]*\)|^#.*?$|^    .*?$|^<.*?$|<[^>]*>", re.DOTALL | re.MULTILINE
)


def terms() -> dict[str, str]:
    """Each word with its anchor, longer words first."""
    heads = re.findall(r"^### (.+)$", GLOSSARY.read_text("utf-8"), flags=re.MULTILINE)
    words = {word: re.sub(r"[^\w]+", "-", head.lower()).strip("-") for head in heads for word in head.split(", ")}
    return dict(sorted(words.items(), key=lambda item: -len(item[0])))


def linked(text: str, page: str) -> str:
    """The page with a link at the first use of each word.

    >>> linked("A receipt has the DfI. The DfI is small.", "fire.md")
    'A [receipt](glossary.md#receipt) has the [DfI](glossary.md#dfi). The DfI is small.'
    """
    home = posixpath.relpath("glossary.md", posixpath.dirname(page) or ".")
    for word, anchor in terms().items():
        taken = [match.span() for match in _APART.finditer(text)]
        case = 0 if word[1:] != word[1:].lower() else re.IGNORECASE
        for match in re.finditer(rf"(?<![\w-]){re.escape(word)}s?(?![\w-])", text, flags=case):
            if not any(start <= match.start() < end for start, end in taken):
                text = f"{text[: match.start()]}[{match[0]}]({home}#{anchor}){text[match.end() :]}"
                break
    return text


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs for every page."""
    path = page.file.src_uri
    return markdown if path in ("glossary.md", "LOG.md", "reference.md") else linked(markdown, path)
