"""The page that lists the members of torch's groups says of each what the tests know, in both languages."""

from __future__ import annotations

import re

import pytest

from tests.backend._members import BACKEND, GROUP, Refused
from tests.docs.blocks import REPOSITORY

OF = {"both": (GROUP, BACKEND), "group": (GROUP,), "backend": (BACKEND,)}
WORDS = {
    "en": {word: word for word in (*OF, "done", "no", "refused")},
    "zh": {"两者": "both", "进程组": "group", "后端": "backend", "支持": "done", "否": "no", "拒绝": "refused"},
}


def rows_of(language):
    """Return ``(table, member, answer)`` of each row of the page's table."""
    words = WORDS[language]
    page = (REPOSITORY / "docs" / language / "reference" / "python" / "communicate.md").read_text()
    for names, of, answer in re.findall(r"^\| (`.*?`) \| (\S+) \| (\w+)", page, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", names):
            yield words[of], name, words[answer]


def answer_of(row):
    if isinstance(row.want, Refused) and not issubclass(row.want.kind, ValueError):  # that is of its arguments
        return "refused"
    return "no" if row.want is False else "done"


@pytest.mark.parametrize("language", WORDS)
def test_the_page_says_what_the_tests_know(language):
    said = sorted(rows_of(language))
    tables = {**dict.fromkeys(GROUP, "group"), **dict.fromkeys(BACKEND, "backend")}
    tables |= dict.fromkeys(GROUP.keys() & BACKEND.keys(), "both")
    assert said == sorted((of, name, answer_of(OF[of][-1][name])) for name, of in tables.items())
