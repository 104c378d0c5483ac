"""What every page stands in: the document with its content policy, the header and the verdict.

Everything that matters is plain HTML, so that it is there without scripts and on paper. Names only ever become text,
and the content policy runs no script but the page's own and fetches nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any

from rekindle.report.words import text

_FLAME = "M12 2c1 4 6 6 6 12a6 6 0 0 1-12 0c0-3 2-4 2-7 2 1 3 2 3 4 1-2 2-5 1-9z"
_ICONS = {
    "healthy": "M5 13l4 4L19 7",
    "done": "M5 13l4 4L19 7",
    "watch": "M12 6v8M12 18v.5",
    "act": "M7 7l10 10M17 7L7 17",
    "plan": "M6 8h12M6 12h12M6 16h8",
}


def document(title: str, head: str, body: str, *, script: str, data: Mapping[str, Any], style: str = "") -> str:
    """The whole page as text: `head` over `body`, with the one script that may run and the data that it reads.

    >>> page = document("A", "", "", script="", data={})
    >>> page.startswith("<!doctype html>"), "http://" in page or "https://" in page
    (True, False)
    """
    shared = files("rekindle.report").joinpath("style.css").read_text()
    # Only a script with this digest runs, whatever a name in the data holds.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; base-uri 'none'"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<link rel="icon" href="data:,"><title>{text(title)} · rekindle</title><style>{shared}{style}</style></head>'
        f'<body><a class="skip" href="#main">Skip to the result</a>{head}<main id="main">{body}</main>'
        f'<script type="application/json" id="data">{_embedded(data)}</script>'
        f"<script>{script}</script></body></html>"
    )


def header(title: str, facts: Iterable[str]) -> str:
    """The mark, the title, and a line for each fact.

    >>> "<h1>A &lt; B</h1>" in header("A < B", [])
    True
    """
    lines = "".join(f"<p>{text(fact)}</p>" for fact in facts)
    return (
        '<header><div class="top"><span class="mark"><svg viewBox="0 0 24 24" aria-hidden="true">'
        f'<path d="{_FLAME}"/></svg>rekindle</span>'
        '<button type="button" id="theme" hidden>Dark</button></div>'
        f"<h1>{text(title)}</h1>{lines}</header>"
    )


def banner(level: str, word: str, sentence: str, more: Iterable[str] = ()) -> str:
    """The verdict: one word, one sentence, then what else has to be said.

    >>> 'class="verdict act"' in banner("act", "Act", "It is tired.")
    True
    """
    rest = "".join(f"<p>{text(line)}</p>" for line in more)
    return (
        f'<section class="verdict {text(level)}" aria-label="Verdict">'
        f'<svg viewBox="0 0 24 24" aria-hidden="true"><path d="{_ICONS.get(level, _ICONS["plan"])}"/></svg>'
        f'<div><p class="word">{text(word)}</p>'
        f'<p class="said">{text(sentence)}</p>{rest}</div></section>'
    )


def _embedded(data: Mapping[str, Any]) -> str:
    """JSON for the script; no `<` survives, so nothing can end the element."""
    packed = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return packed.replace("<", "\\u003c").replace("&", "\\u0026")
