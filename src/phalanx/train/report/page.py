"""The template of a run's report and of the live page of ``phalanx top --web``: frame, sections, tiles and tables.

Everything that comes from the run is escaped for HTML. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

# Control characters: they are invalid in HTML, and some move a terminal's cursor.
_CONTROLS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "\ufffd")


def style() -> str:
    """Return the style sheet."""
    return Path(__file__).with_name("report.css").read_text(encoding="utf-8")


def page(title: str, head: str, content: str, main: str = "") -> str:
    """Return a whole page.

    Args:
        title: Text of the title.
        head: HTML of what else the head contains.
        content: HTML of the page.
        main: HTML attributes of the element that contains the page.
    """
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title>\n{head}</head>\n"
        f"<body><main{main and f' {main}'}>\n{content}</main></body></html>\n"
    ).translate(_CONTROLS)


def section(title: str, content: str, note: str = "") -> str:
    """Return a section of a page; `content` and `note` are HTML."""
    name = title.lower().replace(" ", "-")
    intro = f"<p>{note}</p>" if note else ""
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{title}</h2>{intro}{content}</section>'


def tiles(figures: Iterable[tuple[str, str, str]]) -> str:
    """Return key figures, from the title, the value and a note of each."""
    content = "".join(
        f"<div><dt>{escape(title)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for title, value, note in figures
    )
    return f'<dl class="tiles">{content}</dl>'


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table that scrolls on its own in a narrow window; the first cell is the header of its row."""
    cells = ([escape(cell) for cell in row] for row in rows)
    return table_of_html(title, head, cells)


def table_of_html(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose cells are HTML already."""
    columns = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>' for row in rows
    )
    return (
        f'<div class="scroll" role="region" aria-label="{escape(title)}" tabindex="0">'
        f"<table><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table></div>"
    )
