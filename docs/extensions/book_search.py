"""The index of the book's own search: words of each section, counted, in ``_static/book_index.js``.

Sphinx's index does not know how often a word stands on a page, nor in which section, and its search shows only pages
that have every word of a query. ``static/book_search.js`` ranks sections by this index instead. Words that users say
and the pages do not are in ``search_words.yaml``.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from docutils import nodes
from sphinx import addnodes
from sphinx.util import logging

logger = logging.getLogger(__name__)

_SILENT = (
    addnodes.toctree,
    addnodes.index,
    addnodes.compact_paragraph,
    nodes.comment,
    nodes.raw,
    nodes.title,
    nodes.topic,
)


@dataclass
class Section:
    """A section of a page, or the description of one public name."""

    anchor: str
    title: str
    texts: list[str] = field(default_factory=list)


def sections_of(doctree: nodes.document) -> list[Section]:
    """Return the sections of a page in order; the first is the page's beginning."""
    found: list[Section] = []

    def read(node: nodes.Node) -> Iterator[tuple[Section, str]]:
        for child in getattr(node, "children", ()):
            if isinstance(child, nodes.section):
                anchor = child["ids"][0] if found else ""
                found.append(Section(anchor, child.next_node(nodes.title).astext()))
                yield from read(child)
            elif (
                isinstance(child, addnodes.desc) and child[0].get("ids") and not isinstance(node, addnodes.desc_content)
            ):
                before = found[-1]
                found.append(Section(child[0]["ids"][0], child[0]["ids"][0].removeprefix("cmdoption-")))
                yield from read(child)
                found.append(Section(before.anchor, before.title))
            elif (
                isinstance(child, nodes.TextElement)
                and not isinstance(child, addnodes.desc_signature)
                and not isinstance(child, _SILENT)
            ):
                yield found[-1], child.astext()
            elif not isinstance(child, _SILENT):
                yield from read(child)

    for section, text in read(doctree):
        section.texts.append(text)
    return found


def _write_index(app, exception: Exception | None) -> None:
    if exception is not None or app.builder.name != "html":
        return
    lang = app.builder.indexer.lang

    def words(text: str) -> list[str]:
        stems = (lang.stem(word).lower() for word in lang.split(text) if word.lower() not in lang.stopwords)
        return [stem for stem in stems if lang.word_filter(stem)]

    pages, sections, lengths = [], [], []
    in_text: dict[str, list[int]] = defaultdict(list)
    in_titles: dict[str, list[int]] = defaultdict(list)
    language = "zh" if lang.lang == "zh" else "en"
    also_asked = yaml.safe_load(Path(app.confdir, "search_words.yaml").read_text())[language]
    if unknown := {*also_asked} - {*app.env.found_docs}:
        logger.warning("search_words.yaml: no such page: %s", ", ".join(sorted(unknown)), type="book", subtype="search")
    asked: dict[str, list[int]] = defaultdict(list)
    for docname in sorted(app.env.found_docs):
        also = also_asked.get(docname, [])
        for question in also:
            asked[question.lower()].append(len(pages))
        for section in sections_of(app.env.get_doctree(docname)):
            counted = Counter(words(" ".join(section.texts)))
            titled = words(" ".join([section.title, *(also if not section.anchor else ())]))
            for word, count in counted.items():
                in_text[word] += [len(sections), count]
            for word in dict.fromkeys(titled):
                in_titles[word].append(len(sections))
            sections.append([len(pages), section.anchor, section.title])
            lengths.append(counted.total() + len(titled))
        pages.append([docname, app.env.titles[docname].astext(), words(app.env.titles[docname].astext())])
    index = {"pages": pages, "sections": sections, "lengths": lengths, "text": in_text, "titles": in_titles}
    index["asked"] = asked
    text = json.dumps(index, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    Path(app.outdir, "_static", "book_index.js").write_text(f"const BookIndex = {text};\n")


def setup(app) -> dict[str, bool]:
    """Write the index when the pages are written."""
    app.connect("build-finished", _write_index)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
