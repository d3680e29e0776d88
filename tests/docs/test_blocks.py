"""The runner of the pages' blocks sees what is outdated."""

from __future__ import annotations

import time

import pytest

from tests.docs.blocks import Outdated, run_page


@pytest.fixture
def run(tmp_path):
    """``run(text, limit_s=...)`` runs a page of this text."""

    def run_text(text, **options):
        page = tmp_path / "page.md"
        page.write_text(text)
        folder = tmp_path / "folder"
        folder.mkdir()
        run_page(page, folder, **options)
        return folder

    return run_text


def test_a_page_whose_blocks_do_what_it_says_passes(run):
    folder = run(
        "# Page\n\n```python\n# hello.py\nprint('hello')\n```\n\n```console\n$ python hello.py && \\\n  echo again\n"
        "hello\nagain\n$ ls examples/ring_all_reduce.py\nexamples/ring_...\n```\n\n```python\nprint(1)\nprint(2)\n```\n"
        "Text.\n\n```text\n1\n2\n```\n\n```bash\nexit 3\n```\n"
    )
    assert (folder / "hello.py").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```console\n$ echo new\nold\n```", "prints\nnew\nand the page shows\nold"),
        ("```console\n$ echo one; echo two\none\n```", "prints\none\ntwo"),
        ("```console\n$ false\n```", "exit code 1 instead of 0"),
        ("<!-- exit 1 -->\n```console\n$ true\n```", "exit code 0 instead of 1"),
        ("<!-- exit 1 -->\n```console\n$ exit 1\n```", "ended within command 1 of 1"),
        ("```python\nprint(2)\n```\n\n```text\n1\n```", "page.md:1: prints\n2"),
        ("```python\nraise SystemExit(3)\n```", "exit code 3 instead of 0"),
        ("```python\nimport no_such_name\n```", "ModuleNotFoundError"),
        ("<!-- shown only -->\n```python\n1 / 0\n```", "shown only: REASON"),
        ("<!-- shown only: -->\n```python\n1 / 0\n```", "shown only: REASON"),
        ("<!-- any  order -->\n```console\n$ true\n```", "right:"),
        ("```console\necho\n```", "begins with"),
        ("<!-- any order -->\n```console\n$ printf 'b\\na\\nc\\n'\na\nb\n```", "prints"),
        ("<!-- any order -->\n```console\n$ printf 'b\\na\\n'\na\nb\nb\n```", "prints"),
    ],
)
def test_a_block_that_is_outdated_fails_with_its_line(run, text, message):
    with pytest.raises(Outdated) as caught:
        run(text + "\n")
    assert "page.md:" in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "<!-- shown only: needs a GPU -->\n```python\n1 / 0\n```",
        "<!-- exit 3 -->\n```console\n$ (exit 3)\n$ echo $?\n3\n```",
        "<!-- any order -->\n```console\n$ printf 'b\\na\\n'\na\nb\n```",
        "<!-- any order -->\n```console\n$ printf 'b 1\\na 2\\nb\\n'\na ...\n...\nb\n```",
        "<!-- any order -->\n<!-- exit 1 -->\n```console\n$ printf 'b\\na\\n'; false\na\nb\n```",
        "```console\n$ echo at length\n```",
        "```console\n$ cd examples\n$ basename $PWD\nexamples\n```",
    ],
)
def test_marks_say_what_is_expected(run, text):
    run(text + "\n")


def test_a_page_that_takes_too_long_is_ended(run):
    started = time.monotonic()
    with pytest.raises(Outdated, match="longer than its limit"):
        run("```console\n$ sleep 50\n```\n", limit_s=0.5)
    assert time.monotonic() - started < 10
