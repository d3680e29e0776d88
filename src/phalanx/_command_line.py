"""How every command of ``phalanx`` reads its arguments, shows its help and refuses a mistake."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from phalanx._env import nearest

_WIDTH = 80


class UsageError(ValueError):
    """A mistake in the command line, in one line.

    Attributes:
        right: Call that was probably meant; empty: the usual call of the command.
    """

    def __init__(self, message: str, right: str = "") -> None:
        super().__init__(message)
        self.right = right


class Parser(argparse.ArgumentParser):
    """argparse's parser, whose mistakes raise `UsageError` and whose help fits 80 columns.

    Args:
        prog: Command, such as ``phalanx report``.
        usage: Usage line of the command, without ``usage:``.
        about: Description of the command.
        right: Call to show beside a mistake; default: the usage line.
    """

    def __init__(self, prog: str, usage: str, about: str, right: str = "") -> None:
        super().__init__(
            prog, usage, about.replace("%", "%%"), formatter_class=_Help, add_help=False, allow_abbrev=False
        )
        self.right: str = right or usage
        self._optionals.title, self._positionals.title = "Options", "Arguments"
        self.add_argument("-h", "--help", action="help", help="show this help")

    def add_commands(self, calls: Mapping[str, str]) -> None:
        """Let the help list commands: their calls, and what each does."""
        group = self.add_argument_group("Commands")
        for call, what in calls.items():
            group.add_argument(call, nargs="?", metavar=call, help=what)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str], namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        given, unknown = self.parse_known_args(args, namespace)
        if unknown:
            raise self.unknown(unknown[0], args)
        return given

    def unknown(self, word: str, args: Sequence[str]) -> UsageError:
        """Return the error of a word of `args` that the command does not take."""
        if not word.startswith("-"):
            return UsageError(f"unexpected argument {word!r}")
        name = word.partition("=")[0]
        known = [option for option in self._option_string_actions if option.startswith("--") and "_" not in option]
        near = nearest(name, known, cutoff=0.75)  # of a flag with its dashes, a higher one
        what = f"unknown flag {name}{near and f', did you mean {near}?'}"
        return UsageError(what, self.call(args, {name: near}) if near else "")

    def call(self, args: Sequence[str], meant: Mapping[str, str]) -> str:
        """Return the call of this command with words or flags of `args` replaced."""
        words = [word.partition("=") for word in args]
        return shlex.join([*self.prog.split(), *("".join((meant.get(name, name), *rest)) for name, *rest in words)])

    def error(self, message: str) -> NoReturn:
        """Raise what argparse says, in the words of our other messages."""
        found = re.fullmatch(
            r"argument (\S+?)(?:/\S+)?: (expected one argument|ignored explicit argument (.*))", message
        )
        if found is None:
            message = message.replace("the following arguments are required:", "missing")
            raise UsageError(message.removeprefix("argument ").replace(": must ", " must "))
        name, _, value = found.groups()
        action = self._option_string_actions[name]
        if value is not None:
            raise UsageError(f"{name} takes no value, got {value}")
        raise UsageError(f"{name} needs a value: {name} {action.metavar or action.dest.upper()}")

    def refuse(self, error: UsageError) -> int:
        """Print the usage, the mistake and the right call; return the exit code."""
        is_anothers = error.right.startswith("phalanx run ") and self.prog not in ("phalanx", "phalanx run")
        right = self.right if is_anothers else error.right or self.right
        print(f"usage: {self.usage}\n{self.prog}: {error}; right: {right}", file=sys.stderr)
        return 2

    def _print_message(self, message: str, file: Any = None) -> None:
        print(message, end="", file=file)  # argparse's hides that nobody reads it


def whole_number(text: str) -> int:
    """Return the number that an argument names.

    Raises:
        argparse.ArgumentTypeError: It is not a whole number of at least 0.
    """
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, got {text!r}")
    return int(text)


class _Help(argparse.HelpFormatter):
    """Flags on lines of their own, what they do below them."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=6, width=_WIDTH)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = ", ".join(name for name in action.option_strings if "_" not in name)  # one spelling of two
        return names if action.nargs == 0 else f"{names} {action.metavar or action.dest.upper()}"
