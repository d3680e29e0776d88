"""Pages in a real browser without a window."""

from __future__ import annotations

import html
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

_BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_LIMIT_S = 180  # of a browser that starts on a busy machine

needs_browser = pytest.mark.skipif(_BROWSER is None, reason="needs chromium or google-chrome on the PATH")


def browse(folder: Path, page: Path, *flags: str) -> str:
    """Open a page and return what the browser prints.

    Args:
        folder: Folder for the browser's own files.
        page: File of the page.
        flags: Further flags of the browser, such as ``--dump-dom``.
    """
    assert _BROWSER is not None
    done = subprocess.run(
        [_BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
         "--no-first-run", f"--user-data-dir={folder}/profile", *flags, page.as_uri()],
        capture_output=True, text=True, timeout=_LIMIT_S, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_page(folder: Path, page: str, *flags: str) -> Any:
    """Return the JSON that the scripts of a page have written over its body.

    Args:
        folder: Folder for the page and the browser's own files.
        page: Text of the page, behind its head.
        flags: Further flags of the browser.
    """
    file = folder / "asked.html"
    file.write_text(f"<!DOCTYPE html><meta charset=utf-8><body>{page}", encoding="utf-8")
    dom = browse(folder, file, *flags, "--dump-dom")
    return json.loads(html.unescape(dom.split("<body>", 1)[1].split("</body>", 1)[0]))
