"""``phalanx explain``: prints what a message means and what to do about it."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from phalanx import _env
from phalanx._command_line import Parser, UsageError, misspelled
from phalanx._env import nearest
from phalanx._text import is_terminal
from phalanx.failure.explain.entries import LANGUAGES, TOPICS, Entry, entries
from phalanx.failure.explain.search import find, of_exit

_WIDTH = 80
_LINK = re.compile(r"\[([\w-]+)\]\(\w+\.md#[\w-]+\)")  # a link to another entry, which works only on the site
_GAP = re.compile(
    r"([\u3000-\u30ff\u4e00-\u9fff\uff00-\uffef](?:\x1b\[[\d;]*m)*) (?=(?:\x1b\[[\d;]*m)*[\u4e00-\u9fff])"
)
_TITLES = {
    "en": (
        "Operations", "Ranks that end", "Starting a job", "The machine's limits", "Training and data", "Checkpoints",
        "torch and Gloo", "GPUs and NCCL", "Exit codes",
    ),
    "zh": (
        "集合通信与点对点通信", "rank 结束", "启动作业", "机器的限制", "训练与数据", "检查点",
        "torch 与 Gloo", "GPU 与 NCCL", "退出码",
    ),
}  # fmt: skip
_SEE_ALSO = {"en": "See also:", "zh": "另见:"}


def main(args: Sequence[str]) -> int:
    """Run the command; return 2 for a name or a message that has no entry."""
    parser = Parser(
        "phalanx explain",
        "phalanx explain [NAME | MESSAGE]",
        "Print what an error message means, its likely causes and what to do. Without an argument, list all entries. "
        "A message may be pasted whole or in part; - reads it from standard input.",
    )
    parser.add_argument(
        "words", nargs="*", metavar="NAME | MESSAGE", help="name that a message ends with, or the message itself"
    )
    parser.add_argument(
        "--language", choices=LANGUAGES, metavar="LANGUAGE", help="en or zh (default: by LC_ALL, LC_MESSAGES or LANG)"
    )
    try:
        given = parser.parse_args(args)
        language = given.language or _language()
        if not given.words:
            print("\n".join(_list(language)))
            return 0
        text = _standard_input() if given.words == ["-"] else " ".join(given.words)
        name, near = _find(text)
    except UsageError as error:
        return parser.refuse(error, args)
    _show(entries(language)[name])
    if near:
        print(f"\n{_SEE_ALSO[language]} {', '.join(near)}")
    return 0


def _standard_input() -> str:
    if sys.stdin is None:
        raise UsageError("- reads the message from standard input, which is closed")
    return sys.stdin.read()


def _find(text: str) -> tuple[str, list[str]]:
    """Return the name of the entry that the text means, and the names of other entries that it could mean.

    Raises:
        UsageError: No entry fits.
    """
    known = entries()
    word = text.strip().lower().replace("_", "-")
    if word in known:
        return word, []
    is_name = len(text.split()) == 1
    if is_name and not of_exit(text) and (close := nearest(word, known)):
        raise misspelled(f"no entry {text!r}", text, close)
    name, near = find(text)
    if name:
        return name, near
    what = f"no entry {text!r}" if is_name else "no entry fits this message"
    hints = [*([f"nearest: {', '.join(near)}"] if near else []), "phalanx explain lists all"]
    raise UsageError("; ".join([what, *hints]))


def _language() -> str:
    environ = _env.environment()
    wanted = environ.get("LC_ALL") or environ.get("LC_MESSAGES") or environ.get("LANG") or ""
    return "zh" if wanted.startswith("zh") else "en"


def _list(language: str) -> list[str]:
    """Return a line for each entry, under the title of its topic."""
    known = entries(language)
    width = max(map(len, known))
    lines: list[str] = []
    for topic, title in zip(TOPICS, _TITLES[language], strict=True):
        lines += ["", title] if lines else [title]
        for name, entry in known.items():
            if entry.topic == topic:
                lines += textwrap.wrap(
                    f"  {name:<{width}}  {entry.summary}", _WIDTH, subsequent_indent=" " * (width + 4)
                )
    return lines


def _show(entry: Entry) -> None:
    """Print an entry: formatted on a terminal, plain elsewhere."""
    from rich.console import Console  # imported here, because starting a job must not import rich
    from rich.markdown import Markdown

    shows = is_terminal(sys.stdout)
    console = Console(width=None if shows else _WIDTH, highlight=False, no_color=not shows)
    console.width = min(console.width, _WIDTH)
    with console.capture() as shown:
        console.print(entry.name, style="bold", markup=False)
        console.print()
        console.print(Markdown(_LINK.sub(r"`\1`", entry.text), code_theme="ansi_dark", inline_code_theme=None))
    text: Any = _GAP.sub(r"\1", shown.get())  # drops spaces after **...**, which Markdown needs and Chinese does not
    if not shows:  # rich has padded the blocks to the full width
        text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    print(text, end="")
