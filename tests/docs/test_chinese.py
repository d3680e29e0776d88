"""Line breaks within a Chinese paragraph are no spaces."""

# ruff: noqa: RUF001 Chinese punctuation is what is looked at

from __future__ import annotations

import sys

import pytest
from docutils import nodes
from docutils.utils import new_document

from tests.docs.blocks import REPOSITORY


@pytest.fixture(scope="module")
def chinese():
    sys.path.insert(0, str(REPOSITORY / "docs" / "extensions"))
    import book_chinese

    return book_chinese


def joined(chinese, *children):
    document = new_document("page")
    paragraph = nodes.paragraph("", "", *children)
    document += paragraph
    chinese.JoinLines(document).apply()
    return paragraph.astext()


@pytest.mark.parametrize(
    ("before", "after", "together"),
    [
        ("进程", "组", "进程组"),
        ("主机，", "rank 0", "主机，rank 0"),
        ("后端", "（backend）", "后端（backend）"),
        ("主机的", "rank", "主机的\nrank"),
        ("all_reduce", "broadcast", "all_reduce\nbroadcast"),
    ],
)
def test_a_break_is_a_space_only_beside_latin_letters(chinese, before, after, together):
    assert joined(chinese, nodes.Text(before), nodes.Text("\n"), nodes.Text(after)) == together


def test_every_break_of_a_paragraph_is_looked_at(chinese):
    lines = [nodes.Text("用"), nodes.Text("\n"), nodes.literal("", "run"), nodes.Text("\n"), nodes.Text("启动，")]
    assert joined(chinese, *lines, nodes.Text("\n"), nodes.Text("再看")) == "用\nrun\n启动，再看"
