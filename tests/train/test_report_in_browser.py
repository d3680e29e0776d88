"""report.html in a real browser: what it shows, that it fits on any window, and how it looks."""

from __future__ import annotations

import html
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from phalanx.train.report.report import write_report
from tests.browser import browse, needs_browser, run_page
from tests.train.runs import FakeRun

pytestmark = needs_browser

WIDTHS = (320, 400, 768, 1200)
# Frames are windows of their own: their width is what media queries and percentages see. Only what scrolls by itself
# may reach beyond it.
MEASURE = """
<script>
onload = () => {
  const found = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, width = frame.contentWindow.innerWidth;
    const reach = element => element.getBoundingClientRect();
    const beyond = [...page.body.querySelectorAll("*")].filter(element => !element.closest(".scroll table")
      && (reach(element).right > width + 0.5 || reach(element).left < -0.5));
    const labels = [...page.querySelectorAll(".x, .y")].filter(label => {
      const card = label.closest("figure").getBoundingClientRect(), own = reach(label);
      return own.left < card.left || own.right > card.right || own.bottom > card.bottom;
    });
    return {width, scroll_width: page.documentElement.scrollWidth, text: page.body.innerText,
            beyond: beyond.map(element => element.outerHTML.slice(0, 200)),
            labels: labels.map(label => label.outerHTML),
            loaded: frame.contentWindow.performance.getEntriesByType("resource").map(entry => entry.name)};
  });
  document.body.textContent = JSON.stringify(found);
};
</script>
"""


def measure(folder: Path, *pages: tuple[int, str]) -> list[dict]:
    """Return what a browser sees of each page in a window of that width."""
    frames = "".join(
        f'<iframe srcdoc="{html.escape(page)}" style="width:{width}px;height:900px;border:0"></iframe>'
        for width, page in pages
    )
    return run_page(folder, frames + MEASURE)


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    """The page of a run with whatever is long: names, paths, numbers, many ranks, restarts."""
    folder = tmp_path_factory.mktemp("runs") / f"a-run-with-a-name-{'that-goes-on-' * 8}"
    run = FakeRun(folder, num_ranks=12, data_folder="/home/someone/" + "without-any-space/" * 20)
    run.origin["command"] = "python train.py --data=" + "without-any-space/" * 20
    run.origin["logs"] = "../" + "without-any-space/" * 20
    run.start()
    run.steps(1, 57)
    run.start({"step": 55, "source": "memory"})
    run.steps(56, 200, samples_per_s=123_456_789.0, lr=1.25e-7)
    run.evaluate(200, loss=0.5, **{"balanced_accuracy_of_the_" + "very_" * 20 + "rare_classes": -0.000012345})
    run.write("preempted", step=200, signal=15)
    run.start({"step": 200, "source": "disk"}, gap_s=7200)
    run.steps(201, 298, grad_norm=1e30)
    run.end(298)
    return write_report(folder)


def test_a_browser_shows_every_part_and_nothing_reaches_out_of_a_window(report, tmp_path):
    page = report.read_text()
    too_wide = '<body><div style="width:600px">control</div>'
    *seen, control = measure(tmp_path, *((width, page) for width in WIDTHS), (400, too_wide))
    assert control["beyond"], "the measurement itself sees nothing"
    assert control["scroll_width"] > 400
    for width, found in zip(WIDTHS, seen, strict=True):
        assert found["width"] == width
        assert found["scroll_width"] == width, found["beyond"]
        assert found["beyond"] == []
        assert found["labels"] == []
        assert found["loaded"] == []
        for said in ("Finished", "Training loss", "298", "rank 11", "preempted by SIGTERM", "from memory", "bf16"):
            assert said.lower() in found["text"].lower(), said


@pytest.mark.parametrize(("width", "height"), [(1200, 2400), (400, 4200)])
def test_a_screenshot_shows_text_lines_and_bars(report, tmp_path, width, height):
    picture = tmp_path / "report.png"
    browse(tmp_path, report, f"--screenshot={picture}", f"--window-size={width},{height}")
    image = (matplotlib.image.imread(picture)[:, :, :3] * 255).round().astype(np.uint32)
    colours = image @ np.array([1 << 16, 1 << 8, 1], np.uint32)
    assert colours.shape == (height, width)

    def count(colour: str) -> int:
        return int((colours == int(colour, 16)).sum())

    assert count("f6f7f9") < 0.75 * colours.size, "hardly more than the page's ground"
    assert count("ffffff") > 0.2 * colours.size, "cards"
    for what, colour in (("text", "1a1d23"), ("line", "2459c9"), ("restart", "b3402a"), ("backward", "c2660c")):
        assert count(colour) > 50, what
    bands = np.array_split(colours, 12)
    assert all(len(np.unique(band)) > 10 for band in bands[:9]), "a part of the page is empty"


def test_a_dark_browser_gets_a_dark_page_with_the_same_parts(report, tmp_path):
    picture = tmp_path / "report.png"
    dark = "--blink-settings=preferredColorScheme=0"
    browse(tmp_path, report, f"--screenshot={picture}", "--window-size=1200,2400", dark)
    image = (matplotlib.image.imread(picture)[:, :, :3] * 255).round().astype(np.uint32)
    colours = image @ np.array([1 << 16, 1 << 8, 1], np.uint32)
    for what, colour in (("ground", "121418"), ("cards", "1b1e24"), ("text", "e9ebee"), ("line", "86abff")):
        assert (colours == int(colour, 16)).sum() > 50, what
    assert not (colours == int("f6f7f9", 16)).any(), "the light page's ground"
