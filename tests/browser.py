"""Pages in a real browser without a window."""

from __future__ import annotations

import html
import json
import os
import select
import shutil
import subprocess
import time
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


class Browser:
    """A browser whose pages a test opens, reads and clicks, over the pipes of the DevTools protocol.

    Args:
        folder: Folder for the browser's own files.
    """

    def __init__(self, folder: Path) -> None:
        assert _BROWSER is not None
        ours, self._said = os.pipe()
        self._heard, theirs = os.pipe()

        def hand_over() -> None:
            heard, said = os.dup(ours), os.dup(theirs)  # 3 and 4 may be among them
            os.dup2(heard, 3)
            os.dup2(said, 4)

        self._process = subprocess.Popen(
            [_BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
             "--no-first-run", f"--user-data-dir={folder}/profile", "--remote-debugging-pipe"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder, preexec_fn=hand_over, close_fds=False,
        )  # fmt: skip
        os.close(ours)
        os.close(theirs)
        self._received = bytearray()
        self._number = 0
        self._session = ""
        target = self.tell("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.tell("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._said)
        os.close(self._heard)

    def tell(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol; return its result."""
        answer = self._answer(method, params)
        assert "result" in answer, answer
        return answer["result"]

    def _answer(self, method: str, params: dict[str, Any]) -> Any:
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        asked = {"id": self._number, "method": method, "params": params, **session}
        os.write(self._said, json.dumps(asked).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        return answer

    def open(self, url: str) -> None:
        self.tell("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page; a promise is awaited."""
        answer = self._evaluate(script)
        assert "result" in answer, answer
        assert "exceptionDetails" not in answer["result"], answer
        return answer["result"]["result"].get("value")

    def until(self, script: str) -> Any:
        """Return the first true value of an expression; until then it may fail, as while a page is loaded."""
        deadline = time.monotonic() + _LIMIT_S
        while not (value := self._evaluate(script).get("result", {}).get("result", {}).get("value")):
            assert time.monotonic() < deadline, (script, self.run("document.body.innerText"))
            time.sleep(0.05)
        return value

    def _evaluate(self, script: str) -> Any:
        return self._answer("Runtime.evaluate", {"expression": script, "awaitPromise": True, "returnByValue": True})

    def _next(self) -> Any:
        while b"\0" not in self._received:
            assert select.select([self._heard], [], [], _LIMIT_S)[0], "the browser does not answer"
            more = os.read(self._heard, 1 << 20)
            assert more, "the browser has ended"
            self._received += more
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)
