"""Pages of the site in a real browser, in frames of a page that asks them."""

from __future__ import annotations

import html
from pathlib import Path

from tests.browser import run_page

_SCRIPT = """
<script>
onload = () => {
  const frames = [...document.querySelectorAll("iframe")];
  const found = frames.map(frame => {
    try { return (ASK)(frame.contentWindow); } catch (error) { return `${error}`; }
  });
  document.body.textContent = JSON.stringify(found);
};
</script>
"""


def ask(folder: Path, pages: list[str], question: str, *flags: str, width: int = 360) -> list:
    """Open pages beside each other and return what a function finds out about each.

    Args:
        folder: Folder for the browser's own files.
        pages: Addresses of the pages.
        question: Function in JavaScript that takes a page's window.
        flags: Further flags of the browser.
        width: Width of each page, in pixels.
    """
    frames = "".join(
        f'<iframe src="{html.escape(page)}" style="width:{width}px;height:800px;border:0"></iframe>' for page in pages
    )
    found = run_page(folder, frames + _SCRIPT.replace("ASK", question), "--allow-file-access-from-files", *flags)
    assert [answer for answer in found if isinstance(answer, str)] == []
    return found
