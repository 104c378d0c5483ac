"""The page: a result as one self-contained HTML file. It takes what `to_dict()` gives and knows nothing else.

`page` assembles it, `view` decides what is shown, `advice` does both for a probe, an advice and a ranking, `charts`
draws, `markup` escapes, `showing` gives results `to_html()`, `words` names and writes numbers. May import `extras`;
jinja2 when a page is made. Start reading at `page.render`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rekindle.report.page import render

__all__ = ["render"]


def __getattr__(name: str) -> Any:
    # `words` is what every command imports: it must not import the whole page.
    if name != "render":
        raise AttributeError(f"module 'rekindle.report' has no attribute {name!r}")
    from rekindle.report.page import render

    return render
