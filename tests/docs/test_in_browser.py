"""The site in a real browser: on a phone, light and dark, and without a network."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.browser import needs_browser
from tests.docs.browser import ask
from tools.book import LANGUAGES

pytestmark = needs_browser

WIDTH = 360
DARK = "--blink-settings=preferredColorScheme=0"
LOOK = """page => {
  const root = page.document.documentElement, colour = name => page.getComputedStyle(page.document.body)[name];
  const beyond = [...page.document.querySelectorAll("article *")].filter(element => {
    const box = element.getBoundingClientRect();
    return box.right > page.innerWidth + 0.5
      && !element.closest(".table-wrapper, .highlight, .sig, svg, img[src*='recording_']");  // what scrolls by itself
  });
  return {
    width: page.innerWidth, scroll_width: root.scrollWidth,
    beyond: beyond.map(element => element.outerHTML.slice(0, 200)),
    title: page.document.title, ground: colour("backgroundColor"), text: colour("color"),
    loaded: [...page.document.querySelectorAll("[src], link[href]")].map(one => one.src || one.href),
  };
}"""


def pages_of(site: Path) -> list[Path]:
    """Return the front page and one page of each section, the one with most in it, in both languages."""
    found = []
    for language in LANGUAGES:
        root = site / language
        found += [page for page in (root / "index.html", root / "search.html") if page.exists()]
        for section in sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("_")):
            found.append(max(section.rglob("*.html"), key=lambda page: page.stat().st_size))
    return found


def brightness(colour: str) -> float:
    """Return how bright a colour is, from 0 to 255."""
    return sum(map(float, colour.removeprefix("rgb(").removesuffix(")").split(","))) / 3


@pytest.mark.parametrize("flags", [(), (DARK,)], ids=["light", "dark"])
def test_pages_fit_on_a_phone_and_load_nothing_from_elsewhere(site, tmp_path, flags):
    pages = pages_of(site)
    control = tmp_path / "control.html"
    control.write_text('<body><article><div style="width:600px">too wide</div></article>')
    *seen, too_wide = ask(tmp_path, [page.as_uri() for page in (*pages, control)], LOOK, *flags, width=WIDTH)
    assert too_wide["beyond"], "the measurement itself sees nothing"
    for page, found in zip(pages, seen, strict=True):
        assert found["title"], page
        assert (found["width"], found["scroll_width"], found["beyond"]) == (WIDTH, WIDTH, []), page
        assert found["loaded"], page
        assert [address for address in found["loaded"] if not address.startswith(site.as_uri())] == [], page
        assert (brightness(found["ground"]) < 64) == bool(flags), page
        assert abs(brightness(found["ground"]) - brightness(found["text"])) > 128, page


def test_no_style_or_script_asks_for_another_place(site):
    asks = re.compile(r"""url\(["']?https?:|@import|importScripts|\.src ?= ?["']https?:""")
    files = [path for path in site.rglob("*") if path.suffix in (".css", ".js")]
    assert files
    assert [path for path in files if asks.search(path.read_text())] == []


def test_a_page_leads_to_the_same_page_in_the_other_language(site, tmp_path):
    pages = [page for page in pages_of(site) if page.name != "search.html"]
    question = "page => page.document.querySelector('.other-language a').href"
    found = ask(tmp_path, [page.as_uri() for page in pages], f"page => [({question})(page)]")
    for page, [address] in zip(pages, found, strict=True):
        ours, theirs = ("/en/", "/zh/") if "/en/" in page.as_uri() else ("/zh/", "/en/")
        assert address == page.as_uri().replace(ours, theirs)


@pytest.mark.parametrize(("tag", "language"), [("zh-CN", "zh"), ("en-GB", "en"), ("fr", "en")])
def test_the_front_door_leads_to_the_readers_language(site, tmp_path, tag, language):
    [[address]] = ask(
        tmp_path,
        [(site / "index.html").as_uri()],
        "page => [page.location.href]",
        f"--lang={tag}",
        f"--accept-lang={tag}",
    )
    assert address in ((site / language / "index.html").as_uri(), (site / "index.html").as_uri())
