"""The parser for every ``phalanx`` command: parses arguments, prints help and rejects mistakes."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import errno
import os
import re
import select
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from phalanx._env import nearest
from phalanx._errors import printable
from phalanx._text import complain

_WIDTH = 80


class UsageError(ValueError):
    """A mistake in the command line, in one line.

    Attributes:
        word: Wrong word, or only its flag (``--np`` of ``--np=2``); empty if it is not known what the user meant.
        meant: Words that the user meant in place of `word`.
    """

    def __init__(self, message: str, word: str = "", meant: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.word = word
        self.meant = meant


def misspelled(what: str, word: str, near: str) -> UsageError:
    """Return the error for an unknown word.

    Args:
        what: Start of the message, such as ``unknown command 'rn'``.
        near: Known word that the user may have meant; empty if there is none.
    """
    return UsageError(f"{what}, did you mean {near}?", word, [near]) if near else UsageError(what)


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises `UsageError` for mistakes and whose help fits 80 columns.

    Args:
        prog: Command, such as ``phalanx report``.
        usage: Usage line of the command, without ``usage:``.
        about: Description of the command.
    """

    def __init__(self, prog: str, usage: str, about: str) -> None:
        super().__init__(
            prog, usage, about.replace("%", "%%"), formatter_class=_Help, add_help=False, allow_abbrev=False
        )
        self._optionals.title, self._positionals.title = "Options", "Arguments"
        self.add_argument("-h", "--help", action="help", help="show this help")

    def add_commands(self, calls: Mapping[str, str]) -> None:
        """Add a list of commands to the help text.

        Args:
            calls: Descriptions of the commands, by their calls.
        """
        group = self.add_argument_group("Commands")
        for call, what in calls.items():
            group.add_argument(call, nargs="?", metavar=call, help=what)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str], namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        given, unknown = self.parse_known_args(args, namespace)
        if unknown:
            raise self.unknown(unknown[0])
        return given

    def unknown(self, word: str, advice: str = "") -> UsageError:
        """Return the error for a word that the command does not accept.

        Args:
            advice: Advice about a flag that resembles none of the command's.
        """
        if not word.startswith("-"):
            return UsageError(f"unexpected argument {word!r}")
        if word == "--version":
            return UsageError("--version stands alone: phalanx --version")
        name = word.partition("=")[0]
        known = [option for option in self._option_string_actions if option.startswith("--") and "_" not in option]
        near = nearest(name, known, cutoff=0.75)  # higher than the default, because the dashes make all flags similar
        return misspelled(f"unknown flag {name}{f': {advice}' if advice and not near else ''}", name, near)

    def error(self, message: str) -> NoReturn:
        """Raise argparse's error in the wording of our other messages."""
        found = re.fullmatch(
            r"argument (\S+?)(?:/\S+)?: (expected one argument|ignored explicit argument (.*))", message
        )
        if found is None:
            message = message.replace("the following arguments are required:", "missing")
            raise UsageError(message.removeprefix("argument ").replace(": must ", " must "))
        name, _, value = found.groups()
        if value is not None:
            raise UsageError(f"{name} takes no value, got {value}")
        raise self.without_value(name)

    def without_value(self, name: str) -> UsageError:
        """Return the error for a flag whose value was left out."""
        action = self._option_string_actions[name]
        return UsageError(f"{name} needs a value: {name} {action.metavar or action.dest.upper()}")

    def refuse(self, error: UsageError, args: Sequence[str]) -> int:
        """Print the usage, the mistake and, if it is known, the call that the user meant; return the exit code."""
        said = printable(f"{self.prog}: {error}", keep="\n")
        if right := self._corrected(args, error):
            said += " Right:" if said.endswith("?") else "; right:"
        complain(f"usage: {self.usage}\n{said}", right)
        return 2

    def _corrected(self, args: Sequence[str], error: UsageError) -> str:
        """Return the user's own call with the wrong word replaced; empty if that is uncertain or unprintable."""
        found = [at for at, word in enumerate(args) if error.word and error.word in (word, word.partition("=")[0])]
        if len(found) != 1:  # the word is also another flag's value or the script's argument, or it is in a variable
            return ""
        at = found[0]
        rest = args[at].removeprefix(error.word)  # the value of a flag: =2
        meant = [f"{word}{rest}" for word in error.meant]
        right = shlex.join([*self.prog.split(), *args[:at], *meant, *args[at + 1 :]])
        return right if right.isprintable() else ""  # an escaped form of the path would name another file

    def _print_message(self, message: str, file: Any = None) -> None:
        print(message, end="", file=file)  # argparse's own method ignores errors, so a closed pipe would go unnoticed


def whole_number(text: str) -> int:
    """Parse a whole number.

    Raises:
        argparse.ArgumentTypeError: `text` is not a whole number of at least 0.
    """
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, got {text!r}")
    return int(text)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def exit_code_of(command: Callable[[], int]) -> int:
    """Run a command and return its exit code.

    If the reader of the output ends early, as ``head`` does, the code is that of a program killed by SIGPIPE; after
    Ctrl-C, the code is that of a program killed by SIGINT. If the output can't be written, as on a full disk, the code
    is 1.
    """
    _print_any_name()
    try:
        try:
            return command()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        if not _drop_output_without_reader():
            raise
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:
            raise
        _drop_output(1)
        print(f"phalanx: the output can't be written: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _drop_output_without_reader() -> bool:
    """Redirect streams whose readers have ended, so that Python does not flush to them; return whether any had."""
    waiting = select.poll()
    for fd in (1, 2):
        waiting.register(fd, 0)
    gone = [fd for fd, event in waiting.poll(0) if event & (select.POLLERR | select.POLLHUP)]
    for fd in gone:
        _drop_output(fd)
    return bool(gone)


def _drop_output(fd: int) -> None:
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), fd)


def _print_any_name() -> None:
    """Make every path and name printable on stdout, whatever the encoding of stdout is."""
    codecs.register_error("phalanx.name", _encode_name)
    with contextlib.suppress(AttributeError):  # stdout is None or has been replaced
        sys.stdout.reconfigure(errors="phalanx.name")  # type: ignore[union-attr]


def _encode_name(error: UnicodeError) -> tuple[str | bytes, int]:
    """Encode a path as its original bytes, for programs that read our output; escape what can't be encoded."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.lookup_error("backslashreplace")(error)


class _Help(argparse.HelpFormatter):
    """Puts each flag on a line of its own, with its description below."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=6, width=_WIDTH)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = ", ".join(name for name in action.option_strings if "_" not in name)  # hides --with_underscores
        return names if action.nargs == 0 else f"{names} {action.metavar or action.dest.upper()}"
