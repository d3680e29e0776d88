"""Questions of users find the page that answers them, in the site's own search."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.browser import needs_browser
from tests.docs.browser import ask
from tools.book import LANGUAGES

pytestmark = needs_browser

QUESTIONS = yaml.safe_load(Path(__file__).with_name("questions.yaml").read_text())
SEARCH = """page => {
  const questions = QUESTIONS;
  return questions.map(question => page.eval(
    `Search._performSearch(...Search._parseQuery(${JSON.stringify(question)}))`
  ).slice(-5).reverse().map(result => result[0] + result[2]));
}"""


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_question_finds_its_page_first_or_second(site, tmp_path, language):
    asked = QUESTIONS[language]
    question = SEARCH.replace("QUESTIONS", json.dumps([one["question"] for one in asked]))
    [hits] = ask(tmp_path, [(site / language / "search.html").as_uri()], question)
    missed = [
        f"{one['question']}: {found} instead of {one['pages']}"
        for one, found in zip(asked, hits, strict=True)
        if not {hit.partition("#")[0] for hit in found[:2]} & {*one["pages"]}
    ]
    assert missed == [], "\n".join(missed)


def test_questions_are_of_users():
    assert len(QUESTIONS["en"]) >= 30
    assert len(QUESTIONS["zh"]) >= 10
    threads = [one["thread"] for one in (*QUESTIONS["en"], *QUESTIONS["zh"]) if "thread" in one]
    assert len(threads) >= 40
    assert all(thread.startswith("https://github.com/") for thread in threads)


def test_the_page_of_results_shows_what_was_found(site, tmp_path):
    address = (site / "en" / "search.html").as_uri() + "?q=how+do+I+checkpoint"
    question = "page => [...page.document.querySelectorAll('ul.search li a')].map(link => link.textContent)"
    [titles] = ask(tmp_path, [address], question, "--virtual-time-budget=5000")
    assert titles
