"""The code blocks of a page, run as a reader would: in order, in a new folder beside the examples.

How a page marks its blocks is told in ``docs/en/contributing``. ``python -m tests.docs.blocks PAGE ...`` tries pages
while they are written.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tools.book import Block, Page

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE_LIMIT_S = 180.0  # a page runs for 10 s; beside other tests, on a slow machine, for a minute
_SHOWN = "shown only"
_ANYTHING = "..."
_END_OF_COMMAND = "\x1e"
_LEFT_OUT = re.compile(r"(?!PHALANX_WARM$)(PHALANX|PYTEST|COV)_")  # variables that a reader has not set
_MARK = re.compile(rf"{_SHOWN}: \S.*|any order|exit \d+")

Run = Callable[..., subprocess.CompletedProcess[str]]


class Outdated(AssertionError):
    """A block does not do what its page says."""


@dataclass(frozen=True)
class Command:
    """One command of a console block, and the lines that it prints."""

    command: str
    output: list[str]


def run_page(path: Path, folder: Path, limit_s: float = PAGE_LIMIT_S, run_script: Run | None = None) -> None:
    """Run every block of a page that can run.

    Args:
        path: The page.
        folder: An empty folder, in which the blocks run.
        limit_s: Seconds for all blocks together.
        run_script: Runs the Python blocks, as `tests.forked` does; None: a new interpreter for each.

    Raises:
        Outdated: A block fails, prints something else than the page shows, or is marked in a way that nobody knows.
    """
    (folder / "examples").symlink_to(REPOSITORY / "examples")
    deadline = time.monotonic() + limit_s
    blocks = Page(path).blocks
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        try:
            _run(block, following, folder, deadline, run_script)
        except Outdated as error:
            raise Outdated(f"{path}:{block.line}: {error}") from None


def _run(block: Block, following: Block | None, folder: Path, deadline: float, run_script: Run | None) -> None:
    for mark in block.marks if block.info in ("console", "python") else ():
        if not _MARK.fullmatch(mark):
            raise Outdated(f"the comment before it is {mark!r}; right: 'shown only: REASON', 'any order', 'exit CODE'")
    if any(mark.startswith(_SHOWN) for mark in block.marks):
        return
    if block.info == "console":
        _run_console(block, folder, deadline)
    elif block.info == "python":
        if file := re.match(r"# ([\w/]+\.py)\n", block.body):
            (folder / file[1]).parent.mkdir(parents=True, exist_ok=True)
            (folder / file[1]).write_text(block.body)
            return
        script = folder / f"block_at_line_{block.line}.py"
        script.write_text(block.body)
        if run_script is None:
            code, printed = _finish([sys.executable, script.name], folder, deadline, with_stderr=False)
        else:
            limit_s = max(deadline - time.monotonic(), 0.1)
            done = run_script(script.name, cwd=folder, env=_environment(), timeout=limit_s)
            code, printed = done.returncode, done.stdout + (done.stderr if done.returncode else "")
        _compare_codes({code} - {0}, block, printed)
        if following is not None and following.info == "text":
            _compare(following.body.splitlines(), printed.splitlines(), any_order="any order" in following.marks)


def _run_console(block: Block, folder: Path, deadline: float) -> None:
    commands = read_console(block.body)
    ending = f"__code=$?; printf '{_END_OF_COMMAND}%d{_END_OF_COMMAND}' $__code; (exit $__code)"
    script = "\n".join(f"{shown.command}\n{ending}" for shown in commands)
    _, everything = _finish(["bash", "-c", script], folder, deadline, with_stderr=True)
    *parts, _ = everything.split(_END_OF_COMMAND)
    printed, codes = parts[::2], [int(code) for code in parts[1::2]]
    if len(codes) != len(commands):
        raise Outdated(f"ended within command {len(codes) + 1} of {len(commands)}:\n{everything}")
    _compare_codes({*codes} - {0}, block, everything.replace(_END_OF_COMMAND, "\n"))
    if any(shown.output for shown in commands):  # else the page makes no claim about what is printed
        for shown, output in zip(commands, printed, strict=True):
            try:
                _compare(shown.output, output.splitlines(), any_order="any order" in block.marks)
            except Outdated as error:
                raise Outdated(f"$ {shown.command}\n{error}") from None


def read_console(body: str) -> list[Command]:
    """Return the commands of a console block.

    Raises:
        Outdated: It does not begin with a command.
    """
    found: list[Command] = []
    continues = False
    for line in body.splitlines():
        if continues:
            found[-1] = Command(f"{found[-1].command}\n{line}", [])
        elif line.startswith("$ "):
            found.append(Command(line[2:], []))
        elif found:
            found[-1].output.append(line)
            continue
        else:
            raise Outdated(f"a console block begins with '$ ', got {line!r}")
        continues = line.endswith("\\")
    return found


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not _LEFT_OUT.match(name)}
    environ = {**kept, "PATH": f"{Path(sys.executable).parent}:{kept['PATH']}", "COLUMNS": "80", "TERM": "dumb"}
    # Of an editable install, which no reader has.
    environ["PYTEST_ADDOPTS"] = "-W 'ignore:Module already imported:pytest.PytestAssertRewriteWarning'"
    return environ


def _finish(command: list[str], folder: Path, deadline: float, *, with_stderr: bool) -> tuple[int, str]:
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        process = subprocess.Popen(
            command, cwd=folder, env=_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
            errors="replace", stderr=subprocess.STDOUT if with_stderr else stderr, start_new_session=True,
        )  # fmt: skip
        try:
            printed, _ = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            printed, _ = process.communicate()
            raise Outdated(f"the page's blocks take longer than its limit; until then:\n{printed}") from None
        if process.returncode != 0:
            stderr.seek(0)
            printed += stderr.read()
    return process.returncode, printed


def _compare_codes(codes: set[int], block: Block, printed: str) -> None:
    expected = {int(mark.removeprefix("exit ")) for mark in block.marks if mark.startswith("exit ")} - {0}
    if codes != expected:
        got, want = (", ".join(map(str, sorted(found))) or "0" for found in (codes, expected))
        raise Outdated(f"exit code {got} instead of {want}:\n{printed}")


def _compare(want: list[str], got: list[str], *, any_order: bool) -> None:
    want, got = ([line.rstrip() for line in "\n".join(lines).strip("\n").splitlines()] for lines in (want, got))
    if not (_matches_in_any_order(want, got) if any_order else matches("\n".join(want), "\n".join(got))):
        raise Outdated("\n".join(["prints", *got, "and the page shows", *want]))


def matches(want: str, got: str) -> bool:
    """Whether a text is the other one, in which ``...`` stands for anything."""
    pattern = ".*?".join(map(re.escape, want.split(_ANYTHING)))
    return re.fullmatch(pattern, got, re.DOTALL) is not None


def _matches_in_any_order(want: list[str], got: list[str]) -> bool:
    lines = [line for line in want if line.strip() != _ANYTHING]
    left = list(got)
    for line in sorted(lines, key=lambda line: (_ANYTHING in line, -len(line))):  # what matches least comes first
        match = next((other for other in left if matches(line, other)), None)
        if match is None:
            return False
        left.remove(match)
    return not left or len(lines) < len(want)


def main() -> None:
    """Run the pages that are named, and show what is outdated."""
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            started = time.monotonic()
            run_page(Path(name).resolve(), Path(folder))
            print(f"{name}: as it says, {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
