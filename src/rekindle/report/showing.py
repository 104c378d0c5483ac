"""A result that shows itself as a page, in a file or in a notebook."""

from __future__ import annotations

from html import escape
from typing import Any, ClassVar


class Page:
    """What has a `to_dict()` that `render` knows, under the name `page`.

    >>> class Found(Page):
    ...     page = "health"
    ...     def to_dict(self):
    ...         return {"weights": {}, "verdict": "healthy", "rule": "no rule fired"}
    >>> Found().to_html().startswith("<!doctype html>"), Found()._repr_html_()[:15]
    (True, '<iframe srcdoc=')
    """

    page: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        raise NotImplementedError

    def to_html(self) -> str:
        """One self-contained page; needs the extra `cli`."""
        from rekindle.report.page import render

        return render({self.page: self.to_dict()})

    def _repr_html_(self) -> str:
        """The page within a notebook; the text where pages cannot be made."""
        try:
            page = self.to_html()
        except ImportError:
            return f"<pre>{escape(str(self))}</pre>"
        return f'<iframe srcdoc="{escape(page)}" width="100%" height="640" style="border:0"></iframe>'
