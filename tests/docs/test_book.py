"""``tools/book.py`` finds what is wrong with a page, and ``make docs`` fails with it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.docs.blocks import REPOSITORY
from tools.book import Book

ENGLISH = """# Title

Text with `code` and a [link](other.md#second-part).

![A ring of four ranks](../pictures/ring.svg)

```python
print(1)  # a comment
```
"""
CHINESE = ENGLISH.replace("Text with `code` and a", "文字").replace("a comment", "注释")


@pytest.fixture
def docs(tmp_path):
    """A book of two pages in which nothing is wrong."""
    for language, page in (("en", ENGLISH), ("zh", CHINESE)):
        (tmp_path / language).mkdir()
        (tmp_path / language / "page.md").write_text(page)
        (tmp_path / language / "other.md").write_text("# Other\n\n## Second part\n")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "ring.svg").touch()
    assert sorted(Book(tmp_path).stamp([])) == ["other.md", "page.md"]
    assert list(Book(tmp_path).problems()) == []
    return tmp_path


def change(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("language", "old", "new", "problem"),
    [
        ("en", "other.md", "another.md", "en/page.md: link another.md#second-part: no such file"),
        ("en", "#second-part", "#third-part", "en/page.md: link other.md#third-part: no such heading there"),
        ("zh", "other.md", "another.md", "zh/page.md: link another.md#second-part: no such file"),
        ("en", "A ring of four ranks", "", "en/page.md: image ../pictures/ring.svg has no alternative text"),
        ("en", "ring.svg", "rong.svg", "en/page.md: image ../pictures/rong.svg does not exist"),
        ("en", "../pictures/", "https://example.org/", "would be loaded from another place"),
        ("en", "# Title", "Title", "needs exactly one heading"),
        ("en", "Text", "I think that text", "'I' in: I think"),
        ("en", "Text", "TODO: text", "'TODO' in: TODO"),
        ("en", "Text", "Text " * 35, "a sentence of 40 words"),
        ("en", "Text", "Text. " * 1500, "words without a table of contents"),
        ("en", "Text", "New text", "zh/page.md: the English page has changed since"),
        ("zh", "print(1)", "print(2)", "zh/page.md: the block at line 10 differs from the English page's at line 7"),
        ("zh", "```python\nprint(1)  # 注释\n```", "", "zh/page.md: 0 blocks of code, the English page has 1"),
        ("zh", "# Title", "# Title\n\n## More", "zh/page.md: other headings than the English page: 12 instead of 1"),
        ("zh", "ring.svg", "rong.svg", "zh/page.md: other images"),
        ("zh", "english: ", "chinese: ", "zh/page.md: does not begin with"),
    ],
)
def test_a_mistake_on_a_page_is_named(docs, language, old, new, problem):
    change(docs / language / "page.md", old, new)
    assert problem in "\n".join(Book(docs).problems())


def test_a_page_that_one_language_lacks_is_named(docs):
    (docs / "zh" / "page.md").rename(docs / "zh" / "new.md")
    problems = list(Book(docs).problems())
    assert "docs/zh/page.md: missing" in problems
    assert "docs/zh/new.md: there is no English page of this path" in problems


def test_a_stamp_says_which_english_text_a_chinese_page_says(docs):
    change(docs / "en" / "page.md", "Text", "New text")
    assert list(Book(docs).stamp(["other.md"])) == []
    assert list(Book(docs).stamp(["page.md"])) == ["page.md"]
    assert list(Book(docs).problems()) == []


def test_what_is_wrong_fails_the_build_of_the_book(docs):
    command = [sys.executable, REPOSITORY / "tools" / "book.py", "--docs", docs, "check"]
    assert subprocess.run(command, timeout=60).returncode == 0
    change(docs / "en" / "page.md", "#second-part", "#third-part")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "docs/en/page.md: link other.md#third-part: no such heading there" in done.stderr
    shown = subprocess.run(["make", "--dry-run", "docs"], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    ways = ["tools/book.py check", "tools/book.py build", "pytest -m site tests/docs"]
    assert re.findall("|".join(map(re.escape, ways)), shown.stdout) == ways
