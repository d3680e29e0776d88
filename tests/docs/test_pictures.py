"""The pictures of the documentation are what `tools/draw.py` draws, say what they show, and load nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.browser import needs_browser, run_page

_REPOSITORY = Path(__file__).parents[2]
_PICTURES = sorted((_REPOSITORY / "docs" / "pictures").glob("*.svg"))
_SVG = "{http://www.w3.org/2000/svg}"


def test_the_committed_pictures_are_what_the_script_draws():
    done = subprocess.run(
        [sys.executable, "tools/draw.py", "--check"], cwd=_REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_unknown_picture_is_refused():
    done = subprocess.run(
        [sys.executable, "tools/draw.py", "nothing"], cwd=_REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "no such picture: nothing" in done.stderr


@pytest.mark.parametrize("file", _PICTURES, ids=lambda file: file.stem)
def test_a_picture_is_small_and_described_and_loads_nothing(file):
    text = file.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert root.find(f"{_SVG}title").text
    assert len(root.find(f"{_SVG}desc").text) > 20
    assert len(text) < 60_000
    assert text.count("http") == text.count('xmlns="http')  # names of namespaces are never fetched
    assert "/home" not in text
    assert "/tmp" not in text


@needs_browser
def test_no_text_leaves_its_picture(tmp_path):
    script = """
      const out = [];
      for (const svg of document.querySelectorAll("svg")) {
        const {width, height} = svg.viewBox.baseVal;
        for (const text of svg.querySelectorAll("text")) {
          const box = text.getBBox();
          if (box.x < 2 || box.x + box.width > width - 3 || box.y < 0 || box.y + box.height > height - 1)
            out.push(svg.querySelector("title").textContent + ": " + text.textContent);
        }
      }
      document.body.textContent = JSON.stringify(out);
    """
    pictures = "".join(file.read_text(encoding="utf-8") for file in _PICTURES)
    assert run_page(tmp_path, f"{pictures}<script>{script}</script>") == []
