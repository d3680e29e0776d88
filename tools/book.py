"""Checks and builds the book; ``make docs`` runs ``check`` and ``build``, and the tests of the site.

``docs/en`` and ``docs/zh`` hold the same pages under the same paths, so no table of counterparts is needed. One
Sphinx project (``docs/conf.py``) builds both into ``build/docs``, with warnings as errors. A page loads nothing from
another site, so it looks the same on a machine without a network. What keeps a page true:

- **Code** is run by a test, page by page, as a reader would run it, and must print what the page shows
  (``tests/docs/blocks.py``).
- **A Chinese page** states, in its first lines, the hash of the English page that it translates. Once the translation
  is up to date again, ``stamp`` writes the new hash. ``check`` finds outdated translations, blocks that differ between
  the languages, dead links, images without alternative text and sentences that are too long.
- **The reference** is generated from docstrings, from the commands' own parsers and from the declarations of variables
  (``docs/extensions/book_commands.py``), so a flag can't be forgotten. Tests check that no public name is missing, and
  that each has an example in its docstring, which runs.
- **Numbers** in tables come from ``docs/numbers``, see `tables`.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.front_matter import front_matter_plugin
from myst_parser.slugs import github_slugify

REPOSITORY = Path(__file__).resolve().parents[1]
LANGUAGES = ("en", "zh")
MOST_WORDS_OF_A_SENTENCE = 35
MOST_WORDS_WITHOUT_CONTENTS = 1500
_STAMP = re.compile(r"\A---\nenglish: (\w*)\n---\n")
_COMMENT = re.compile(r"(?:^|(?<=\s))(?:#|//)(?:\s.*)?$", re.MULTILINE)
_LEFTOVERS = re.compile(r"\b(?:I|I'm|I've|I'll|my|mine|myself|TODO|FIXME|XXX|TBD)\b")
_TARGET = re.compile(r"^\(([\w-]+)\)=$|\bid=\"([\w-]+)\"", re.MULTILINE)
_GENERATES_ANCHORS = re.compile(r"\{(?:auto\w+|eval-rst|phalanx-\w+|glossary)\}")
_PROSE_DIRECTIVE = re.compile(r"\{(?:note|tip|hint|important|warning|seealso|admonition)\}")
_INCLUDE = re.compile(r"^```\{include\} (\S+)\n```\n", re.MULTILINE)
_PARSER = MarkdownIt("commonmark").enable("table").use(front_matter_plugin)


@dataclass(frozen=True)
class Block:
    """A fenced block, with the comments on the lines before it."""

    info: str
    body: str
    line: int
    marks: tuple[str, ...] = ()

    @property
    def is_code(self) -> bool:
        """Whether the block is code or output rather than a directive with text of its own."""
        return not self.info.startswith("{") or self.info.startswith(("{literalinclude}", "{code-block}"))

    @property
    def untranslated(self) -> tuple[str, str]:
        """Language and body without comments, which may be translated."""
        return self.info, re.sub(r"[ \t]+$", "", _COMMENT.sub("", self.body), flags=re.MULTILINE)


class Page:
    """One Markdown file of the book."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.source = path.read_text()

    @cached_property
    def text(self) -> str:
        """The page with the files that it includes."""
        return _INCLUDE.sub(lambda found: (self.path.parent / found[1]).read_text(), self.source)

    @cached_property
    def tokens(self) -> list[Token]:
        """The page as Markdown sees it."""
        return _PARSER.parse(self.text)

    @cached_property
    def blocks(self) -> list[Block]:
        """All fenced blocks, in order."""
        found: list[Block] = []
        marks: list[str] = []
        for token in self.tokens:
            if token.type == "html_block":
                marks += re.findall(r"<!--\s*(.*?)\s*-->", token.content)
                continue
            if token.type == "fence":
                found.append(Block(token.info.strip(), token.content, (token.map or [0])[0] + 1, tuple(marks)))
            marks.clear()
        return found

    @cached_property
    def prose(self) -> list[Token]:
        """Paragraphs, headings, cells of tables, and the text inside notes."""
        notes = [_PARSER.parse(block.body) for block in self.blocks if _PROSE_DIRECTIVE.match(block.info)]
        return [token for tokens in (self.tokens, *notes) for token in tokens if token.type == "inline"]

    @cached_property
    def headings(self) -> list[tuple[str, str]]:
        """Level and text of each heading."""
        pairs = zip(self.tokens, self.tokens[1:], strict=False)
        return [(token.tag, _plain(inline)) for token, inline in pairs if token.type == "heading_open"]

    @cached_property
    def anchors(self) -> set[str]:
        """Names that a link to this page can have after ``#``."""
        found = {before or inside for before, inside in _TARGET.findall(self.text)}
        for _, title in self.headings:
            slug = github_slugify(title)
            num_same = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", anchor) is not None for anchor in found)
            found.add(f"{slug}-{num_same}" if num_same else slug)
        return found

    @cached_property
    def links(self) -> list[str]:
        """Addresses of all links."""
        children = [child for token in self.prose for child in token.children or []]
        return [str(child.attrs["href"]) for child in children if child.type == "link_open"]

    @cached_property
    def images(self) -> list[tuple[str, str]]:
        """Address and alternative text of each image."""
        children = [child for token in self.prose for child in token.children or []]
        found = [(str(child.attrs["src"]), child.content) for child in children if child.type == "image"]
        for block in self.blocks:
            if directive := re.match(r"\{(?:image|figure)\} (\S+)", block.info):
                alt = re.search(r"^:alt: (.+)$", block.body, re.MULTILINE)
                found.append((directive[1], alt[1] if alt else ""))
        return found

    @cached_property
    def sentences(self) -> list[str]:
        """All sentences of the prose; code within them counts as a word."""
        return [s for token in self.prose for s in re.split(r"(?<=[.!?])[)\"]?\s+", _plain(token, code="code")) if s]

    @property
    def num_words(self) -> int:
        """Number of words of the prose."""
        return sum(len(sentence.split()) for sentence in self.sentences)

    @property
    def has_contents(self) -> bool:
        """Whether the page has a table of contents."""
        return any(block.info.startswith("{contents}") for block in self.blocks)


def _plain(inline: Token, code: str | None = None) -> str:
    words = []
    for child in inline.children or []:
        if child.type == "text":
            words.append(child.content)
        elif child.type == "code_inline":
            words.append(child.content if code is None else code)
        elif child.type in ("softbreak", "hardbreak"):
            words.append(" ")
    return "".join(words)


class Book:
    """The pages of both languages under one folder."""

    def __init__(self, docs: Path) -> None:
        self.docs = docs
        self.english, self.chinese = (
            {str(path.relative_to(docs / lang)): Page(path) for path in sorted((docs / lang).rglob("*.md"))}
            for lang in LANGUAGES
        )
        self._others: dict[Path, Page] = {}

    def problems(self) -> Iterator[str]:
        """Yield what is wrong, page by page."""
        for name, page in self.english.items():
            yield from (f"docs/en/{name}: {what}" for what in (*self._alone(page), *_style(page)))
        for name, page in self.chinese.items():
            found = [*self._alone(page), *_stray_stamp(page)]
            if name in self.english:
                found += _differences(self.english[name], page)
            else:
                found.append("there is no English page of this path")
            yield from (f"docs/zh/{name}: {what}" for what in found)
        yield from (f"docs/zh/{name}: missing" for name in self.english if name not in self.chinese)

    def stamp(self, names: list[str]) -> Iterator[str]:
        """Write the hash of the English page into each named Chinese page; yield the names of pages that changed."""
        for name, page in self.chinese.items():
            if name not in self.english or (names and name not in names):
                continue
            stamped = f"---\nenglish: {_state(self.english[name])}\n---\n" + _STAMP.sub("", page.source)
            if stamped != page.source:
                page.path.write_text(stamped)
                yield name

    def _alone(self, page: Page) -> Iterator[str]:
        if [tag for tag, _ in page.headings].count("h1") != 1:
            yield "needs exactly one heading of the first level"
        for address, alt in page.images:
            if not alt.strip():
                yield f"image {address} has no alternative text"
            if "://" in address:
                yield f"image {address} would be loaded from another place"
            elif not (page.path.parent / address).exists():
                yield f"image {address} does not exist"
        for address in page.links:
            if what := self._why_dead(page, address):
                yield f"link {address}: {what}"

    def _why_dead(self, page: Page, address: str) -> str:
        if re.match(r"[a-z]+:", address):
            return ""
        file, _, anchor = unquote(address).partition("#")
        path = (page.path.parent / file).resolve() if file else page.path.resolve()
        if not path.exists():
            return "no such file"
        if anchor and path.suffix == ".md":
            target = self._others.setdefault(path, Page(path))
            if anchor not in target.anchors and not _GENERATES_ANCHORS.search(target.text):
                return "no such heading there"
        return ""


def _style(page: Page) -> Iterator[str]:
    for sentence in page.sentences:
        if (count := len(sentence.split())) > MOST_WORDS_OF_A_SENTENCE:
            yield f"a sentence of {count} words, at most {MOST_WORDS_OF_A_SENTENCE}: {sentence[:80]}..."
        if leftover := _LEFTOVERS.search(sentence):
            yield f"{leftover[0]!r} in: {sentence[:80]}"
    if page.num_words > MOST_WORDS_WITHOUT_CONTENTS and not page.has_contents:
        yield f"{page.num_words} words without a table of contents: begin with a {{contents}} block"


def _stray_stamp(page: Page) -> Iterator[str]:
    if not _STAMP.match(page.text):
        yield "does not begin with ---, english: HASH, ---: run tools/book.py stamp"


def _differences(english: Page, chinese: Page) -> Iterator[str]:
    stamp = _STAMP.match(chinese.text)
    if stamp and stamp[1] != _state(english):
        yield "the English page has changed since: bring this one up to date, then run tools/book.py stamp"
    if [tag for tag, _ in english.headings] != [tag for tag, _ in chinese.headings]:
        yield f"other headings than the English page: {_levels(chinese)} instead of {_levels(english)}"
    if english.has_contents != chinese.has_contents:
        yield "a table of contents in one language only"
    if [address for address, _ in english.images] != [address for address, _ in chinese.images]:
        yield "other images than the English page"
    ours, theirs = ([block for block in page.blocks if block.is_code] for page in (chinese, english))
    for our, their in zip(ours, theirs, strict=False):
        if our.untranslated != their.untranslated:
            yield f"the block at line {our.line} differs from the English page's at line {their.line}"
            return
    if len(ours) != len(theirs):
        yield f"{len(ours)} blocks of code, the English page has {len(theirs)}"


def _levels(page: Page) -> str:
    return "".join(tag[1] for tag, _ in page.headings)


def _state(english: Page) -> str:
    return hashlib.sha256(english.path.read_bytes()).hexdigest()[:12]


def build(docs: Path, html: Path) -> bool:
    """Build the site in both languages, with warnings as errors; return whether both builds succeeded.

    Args:
        docs: Folder of the book.
        html: Folder for the site; pages from an earlier build are updated.
    """
    sphinx = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-c", docs]
    started = [
        subprocess.Popen(
            [*sphinx, "-t", language, "-d", html / ".doctrees" / language, docs / language, html / language]
        )
        for language in LANGUAGES
    ]
    html.mkdir(parents=True, exist_ok=True)
    shutil.copy(docs / "root.html", html / "index.html")
    return [process.wait() for process in started] == [0, 0]


def main() -> None:
    """Run one command; if there are problems, show all of them, and exit with code 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, default=REPOSITORY / "docs", help="folder of the book (default: docs)")
    commands = parser.add_subparsers(dest="command", required=True)
    stamp = commands.add_parser("stamp", help="write into Chinese pages which English text they say")
    stamp.add_argument("pages", nargs="*", help="paths such as guides/tune.md (default: all)")
    commands.add_parser("check", help="list what is wrong with the pages")
    html = commands.add_parser("build", help="build the site, in both languages")
    html.add_argument("html", nargs="?", type=Path, default=REPOSITORY / "build" / "docs", help="folder for it")
    options = parser.parse_args()
    if options.command == "build":
        if not build(options.docs, options.html):
            sys.exit(1)
        print(f"The book: {options.html / 'index.html'}")
        return
    book = Book(options.docs)
    if options.command == "stamp":
        names = [re.sub(r"^(?:.*/)?docs/(?:en|zh)/", "", name) for name in options.pages]
        if unknown := set(names) - {*book.chinese}:
            parser.error(f"no Chinese page {', '.join(sorted(unknown))}")
        print("\n".join(book.stamp(names)) or "all pages had their stamp")
    elif problems := list(book.problems()):
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
