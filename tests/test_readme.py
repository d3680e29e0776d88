"""The examples of the README run as they stand there, and both READMEs show the same code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.launch.flags import read_flags

_REPOSITORY = Path(__file__).parents[1]
_ENGLISH, _CHINESE = ((_REPOSITORY / name).read_text() for name in ("README.md", "README.zh-CN.md"))


def blocks(text, language):
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [body for kind, body in found if kind == language]


def without_comments(text):
    return [re.sub(r" +#.*", "", body) for kind in ("python", "") for body in blocks(text, kind)]


def run(command, folder):
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("example", blocks(_ENGLISH, "python"))
def test_an_example_runs(tmp_path, example):
    (tmp_path / "example.py").write_text(example)
    if "phalanx.spawn" in example:
        done = run([sys.executable, "example.py"], tmp_path)
        assert done.stdout == "[10, 10]\n"
    elif "phalanx.Trainer" in example:
        done = run([sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2", "example.py"], tmp_path)
        assert "[rank 0] epoch 5, step 80: training loss" in done.stdout
        assert (tmp_path / "runs" / "example" / "report.html").exists()
    else:
        done = run([sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2", "example.py"], tmp_path)
        assert {line.split(":")[0].split(" of ")[0] for line in done.stdout.splitlines()} == {
            "[rank 0] rank 0",
            "[rank 1] rank 1",
        }
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


def test_every_launch_that_is_shown_is_understood():
    shown = re.findall(r"^(?:srun [^#]*?)?phalanx run (.*?)(?: +#.*)?$", "".join(blocks(_ENGLISH, "")), re.MULTILINE)
    assert len(shown) >= 6
    for line in shown:
        _, target = read_flags(line.split(), {}, {}, "")
        assert target[0] in ("train.py", "hello.py", "package.train", "examples/train_digits.py")


def test_both_languages_show_the_same_code():
    assert without_comments(_CHINESE) == without_comments(_ENGLISH)


def outline(text):
    """Return headings, code blocks, rows of tables and items of lists, each as its kind, in their order."""
    prose = re.sub(r"^```.*?^```$", "```", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^(#+ |```|\||- )", prose, re.MULTILINE)


def test_both_languages_have_the_same_sections_lists_and_tables():
    assert outline(_CHINESE) == outline(_ENGLISH)


def test_rows_of_tables_name_the_same_code_in_both_languages():
    def codes(text):
        rows = re.findall(r"^\|.*", text, re.MULTILINE)
        return [
            [code for code in re.findall("`[^`]+`", row) if "<" not in code] for row in rows
        ]  # <flag> is translated

    assert codes(_CHINESE) == codes(_ENGLISH)


@pytest.mark.parametrize("text", [_ENGLISH, _CHINESE], ids=["English", "Chinese"])
def test_what_ends_in_a_colon_is_followed_by_what_it_announces(text):
    announced = re.findall(r"^(?!- |  |\|).*[:\uff1a]\n\n(.*)$", text, re.MULTILINE)
    assert len(announced) > 10
    assert all(line.startswith(("```", "|", "-")) for line in announced), announced
