"""Reads the entries of ``phalanx explain``: sections of the topics' files, each named by its heading.

The first paragraph of a section says in one line what happened. Its ``text`` blocks hold the messages as they are
printed, separated by blank lines; ``<words>`` in angle brackets stand for parts that vary, and a line that begins with
four spaces continues the line before it.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path

LANGUAGES = ("en", "zh")
TOPICS = (
    "operations",
    "ranks",
    "starting",
    "system",
    "training",
    "checkpoints",
    "torch_and_gloo",
    "gpus",
    "exit_codes",
)
"""Names of the files, in the order in which they are listed."""

_HEADING = re.compile(r"^## ([a-z0-9-]+)\n", re.MULTILINE)
_MESSAGES = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_BREAK = re.compile(r"\n {4}(?! )")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One explanation.

    Attributes:
        name: Name, as in ``phalanx explain NAME``.
        topic: Name of its file.
        summary: Line that says what happened.
        text: Whole section in Markdown, without the heading.
    """

    name: str
    topic: str
    summary: str
    text: str

    @property
    def messages(self) -> list[str]:
        """The messages as they are printed, without the line breaks that only the width of the file requires."""
        blocks = "\n\n".join(_MESSAGES.findall(self.text))
        messages = re.split(r"\n\s*\n", blocks.strip())
        return [_BREAK.sub(" ", message) for message in messages]


@functools.cache
def entries(language: str = "en") -> dict[str, Entry]:
    """Return all entries by name, topic by topic.

    Args:
        language: One of `LANGUAGES`.
    """
    found = {}
    for topic in TOPICS:
        path = Path(__file__).with_name(language) / f"{topic}.md"
        parts = _HEADING.split(path.read_text(encoding="utf-8"))
        for name, text in zip(parts[1::2], parts[2::2], strict=True):
            summary = text.strip().partition("\n\n")[0]
            found[name] = Entry(name, topic, " ".join(summary.split()), text.strip())
    return found
