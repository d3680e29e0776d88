"""What the book changes about Sphinx's pages: the language switch, and tables of contents inside a page."""

from __future__ import annotations

from docutils import nodes
from docutils.parsers.rst.directives.parts import Contents

_USEFUL_HERE = "this-will-duplicate-information-and-it-is-still-useful-here"
"""Furo hides its own table of contents on narrow windows and objects to others unless they have this class."""


class PageContents(Contents):
    """The table of contents of a long page: without the page's own title."""

    def run(self) -> list[nodes.Node]:
        """Return the table, as a local one of Furo's."""
        self.options.setdefault("local", None)
        self.options.setdefault("class", [_USEFUL_HERE])
        return super().run()


def _name_other_language(app, pagename, templatename, context, doctree) -> None:
    """Give templates the address of the same page in the other language."""
    up = "../" * (pagename.count("/") + 1)
    context["other_language_url"] = f"{up}{context['other_language']}/{pagename}.html"


def setup(app) -> dict[str, bool]:
    """Register both."""
    app.add_directive("contents", PageContents, override=True)
    app.connect("html-page-context", _name_other_language)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
