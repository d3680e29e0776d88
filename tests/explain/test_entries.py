"""Everything that phalanx prints is explained, in both languages, and the explanations quote what it prints today."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import phalanx
from phalanx._errors import _ENTRIES, KINDS, PhalanxError
from phalanx.failure.explain.entries import LANGUAGES, TOPICS, Entry, entries
from phalanx.failure.explain.search import find

PACKAGE = Path(phalanx.__file__).parent
DOCS = PACKAGE.parents[1] / "docs"
OTHERS = ("torch_and_gloo", "gpus", "exit_codes")  # topics whose messages are not only ours
OF_TORCH = (
    "torch.", "RuntimeError: [", "ValueError: Error initializing", "RuntimeError: Address already",
    "RuntimeError: An attempt", "RuntimeError: Expected to",
    "RuntimeError: can't start", "RuntimeError: received 0", "RuntimeError: Too many", "RuntimeError: DataLoader",
    "ValueError: Default process", "ValueError: trying", "ValueError: Unknown c10d", "OSError:", "BlockingIOError",
    "MemoryError", "Bus error", "Fatal Python",
)  # fmt: skip
PLACE = re.compile(r"<[^<>]+>")
DIFFERS = re.compile(r"<[^<>]+>|\b\d+\b")
JOINT = re.compile(r"(?<=[:;.,])\s|\(|\)|\n")
PREFIX = re.compile(r"^(?:phalanx\.\w+|\w+(?:Error|Warning)|hint|phalanx(?: [a-z]+)?): ")
LEAST_CHARS = 12


def pieces_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return ["\0".join("".join(pieces_of(one)) if isinstance(one, ast.Constant) else "" for one in node.values)]
    return []


@pytest.fixture(scope="module")
def source() -> str:
    """Every text in the package's code, with one space between words."""
    texts = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            texts += pieces_of(node)
    return "\1".join(" ".join(re.split(r"[ \n]+", text)) for text in texts)


def ours() -> dict[str, list[str]]:
    """Return the messages of each entry that are not torch's alone."""
    found = {
        entry.name: [
            message
            for message in entry.messages
            if not message.startswith(OF_TORCH)
            and (entry.topic not in OTHERS or message.startswith(("phalanx", "hint:", "RuntimeError: rank <rank>")))
        ]
        for entry in entries().values()
    }
    return {name: messages for name, messages in found.items() if messages}


@pytest.mark.parametrize(("name", "messages"), ours().items(), ids=ours())
def test_a_message_of_ours_is_still_printed_in_these_words(source: str, name: str, messages: list[str]) -> None:
    wrong = []
    for message in messages:
        text = PREFIX.sub("", message)
        parts = [part.strip(" .:;,-") for between in DIFFERS.split(text) for part in JOINT.split(between)]
        long = [part for part in parts if len(part) >= LEAST_CHARS]
        if not long and len(re.findall(r"[a-z]{3,}", "".join(parts))) >= 6:
            wrong.append(f"nothing to recognize {message!r} by")
        wrong += [f"nothing prints {part!r}" for part in long if not is_composed_of(source, part)]
    assert not wrong, f"bring the entry {name} up to date"


def is_composed_of(source: str, part: str, most: int = 3) -> bool:
    """Whether a text is in the source, or in so many pieces that are put together when it is printed."""
    if part in source:
        return True
    words = part.split()
    cuts = range(len(words) - 1, 0, -1) if most > 1 else ()
    return any(
        " ".join(words[:cut]) in source and is_composed_of(source, " ".join(words[cut:]), most - 1) for cut in cuts
    )


def subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(subclasses, kind.__subclasses__()))


def test_every_error_of_ours_has_an_entry() -> None:
    from phalanx.checkpoint.disk.folder import Damaged  # what another error quotes

    for kind in {*subclasses(PhalanxError), *KINDS.values()}:
        assert kind.entry in entries() or kind is Damaged, kind
    assert set(_ENTRIES.values()) <= entries().keys()


def addresses() -> set[str]:
    """Every entry that the code names: in a call, a table, a class or a text."""
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent.name == "explain":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "entry" and isinstance(node.value, ast.Constant):
                found.add(node.value.value)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "address":
                found |= {one.value for one in node.args if isinstance(one, ast.Constant)}
            if isinstance(node, ast.Dict):
                pairs = zip(node.keys, node.values, strict=True)
                texts = [
                    (key.value, one.value)
                    for key, one in pairs
                    if isinstance(key, ast.Constant) and isinstance(one, ast.Constant)
                ]
                found |= {text for key, text in texts if key == "entry"}
    return found - {""}


def test_every_address_that_is_printed_has_an_entry() -> None:
    from phalanx.failure.hints import _EXPLAINED_SIGNALS, _HINTS

    printed = addresses() | {hint.entry for hint in _HINTS if hint.entry} | {*_EXPLAINED_SIGNALS.values()}
    assert len(printed) > 30
    assert printed <= entries().keys()


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_entry_exists_in_both_languages(language: str) -> None:
    assert list(entries(language)) == list(entries())
    for name, entry in entries(language).items():
        assert entry.messages == entries()[name].messages, f"{language}: {name} quotes other messages"
        assert len(entry.summary) <= 90, name


def test_the_chinese_entries_are_chinese() -> None:
    for name, entry in entries("zh").items():
        prose = re.sub(r"```.*?```|`[^`]*`", "", entry.text, flags=re.DOTALL)
        assert len(re.findall(r"[\u4e00-\u9fff]", prose)) > 20, name


def test_every_topic_has_a_page_in_both_languages() -> None:
    for language in LANGUAGES:
        index = (DOCS / language / "errors" / "index.md").read_text()
        for topic in TOPICS:
            page = (DOCS / language / "errors" / f"{topic}.md").read_text()
            assert f"src/phalanx/failure/explain/{language}/{topic}.md" in page
            assert re.search(rf"^{topic}$", index, re.MULTILINE), f"the toctree lacks {topic}"
        for name, entry in entries(language).items():
            assert f"({entry.topic}.md#{name})" in index, f"{language}: the list lacks {name}"


@pytest.mark.parametrize("entry", entries().values(), ids=lambda entry: entry.name)
def test_a_pasted_message_finds_its_entry(entry: Entry) -> None:
    """With real values in the place of what differs, and with much around it."""
    for message in entry.messages:
        text = PLACE.sub("17", message)
        if len(re.findall(r"[a-z]{3,}", text)) < 4:
            continue
        name, near = find(f"Traceback (most recent call last):\n  File train.py\n{text}\n")
        assert entry.name in (name, *near), f"{message}: {name}, {near}"
