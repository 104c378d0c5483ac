"""HTML and SVG that escape by themselves: the templates of the pages, and `element()` for drawings.

Every text that reaches a page passes through here. Control characters are made visible first, then `<`, `&` and
quotes are escaped, unless the value is markup that was made here.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from rekindle.extras import require
from rekindle.report.words import number, plural, printable, size

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


@cache
def environment(*packages: str) -> Environment:
    """The templates of these packages, each in its folder `templates`; the first that has a name gives it.

    >>> environment("rekindle.report").from_string("<b>{{ name }}</b>").render(name="<script>")
    '<b>&lt;script&gt;</b>'
    """
    jinja2 = require("jinja2", "cli", "a page")
    found: Environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(package) for package in packages]),
        autoescape=True,
        finalize=_visible,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"number": number, "plural": plural, "size": size, "breakable": breakable}
    return found


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """One element with its children; names and texts are escaped, `class_` is class, `_` in a name is `-`.

    >>> element("text", "a < b", x=1.25, class_="tick")
    Markup('<text x="1.2" class="tick">a &lt; b</text>')
    """
    markupsafe = require("markupsafe", "cli", "a drawing")
    shown = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{markupsafe.escape(_visible(_rounded(value)))}"'
        for name, value in attributes.items()
        if value is not None
    )
    inside = "".join(str(markupsafe.escape(_visible(child))) for child in children)
    made: Markup = markupsafe.Markup(f"<{tag}{shown}>{inside}</{tag}>" if inside else f"<{tag}{shown}/>")
    return made


def joined(parts: object) -> Markup:
    """Several elements one after the other; a part that is plain text is escaped.

    >>> joined([element("i"), "<"])
    Markup('<i/>&lt;')
    """
    found: Markup = require("markupsafe", "cli", "a drawing").Markup("").join(parts)
    return found


def breakable(name: str) -> Markup:
    """A layer's name that may break after its dots.

    >>> breakable("a.<b")
    Markup('a.<wbr>&lt;b')
    """
    markupsafe = require("markupsafe", "cli", "a page")
    found: Markup = markupsafe.escape(printable(str(name))).replace(".", markupsafe.Markup(".<wbr>"))
    return found


def _visible(value: object) -> object:
    return printable(value) if type(value) is str else value


def _rounded(value: object) -> Any:
    return f"{value:.1f}" if isinstance(value, float) else value
