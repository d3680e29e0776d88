"""Directives that print what the code declares: a command's flags, and the environment variables.

``{phalanx-commands}`` shows the help of every command, from the parser that the command itself makes;
``{phalanx-environment} settings`` a group of environment variables, from where they are declared. Nothing of it is
typed on a page, so a flag can't be forgotten there.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from docutils import nodes
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

import phalanx
from phalanx import _env, _settings, cli
from phalanx._command_line import Parser
from phalanx.checkpoint import ckpt
from phalanx.launch.command.flags import FLAGS

COMMANDS = [
    "",
    *(name for name in cli._COMMANDS if name != "ckpt"),
    "ckpt",
    *(f"ckpt {name}" for name in ckpt._COMMANDS),
]
"""All commands, without ``phalanx``."""


class _HelpAsked(Exception):
    """Carries the parser that was about to print its help."""


def parser_of(command: str) -> Parser:
    """Return the parser of a command, as the command makes it."""

    def caught(parser: Parser, file: object = None) -> None:
        raise _HelpAsked(parser)

    with mock.patch.object(Parser, "print_help", caught):
        try:
            cli.main([*command.split(), "--help"])
        except _HelpAsked as asked:
            return asked.args[0]
    raise ValueError(f"phalanx {command} --help shows no help")


def flags_of(parser: Parser) -> Iterator[tuple[str, list[argparse.Action]]]:
    """Yield title and flags of each group that the help of a parser lists."""
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.help is not argparse.SUPPRESS]
        if actions:
            yield group.title or "", actions


def variables() -> dict[str, dict[str, str]]:
    """Return the environment variables, by group and name, each with a description in Markdown."""
    of_settings, of_env = (
        {
            name: " ".join(lines).strip()
            for (_, name), lines in ModuleAnalyzer.for_module(module).find_attr_docs().items()
        }
        for module in ("phalanx._settings", "phalanx._env")
    )
    settings = {}
    for setting in dataclasses.fields(_settings.Settings):
        least, most = setting.metadata.get("range", (None, None))
        limits = "" if least is None else f", from {least:.12g} to {most:.12g}"
        default = f"`{setting.default:.12g}`" if limits else f"`{setting.default}`" if setting.default else "empty"
        settings[_settings.variable_of(setting.name)] = (
            f"{_markdown(of_settings[setting.name])} Default: {default}{limits}."
        )
    others = {getattr(_env, name): _markdown(text) for name, text in of_env.items() if name.endswith("_VARIABLE")}
    others = {name: text for name, text in others.items() if name not in settings}
    flags = {
        variable: f"`--{flag.name}` | {_escaped(flag.help.replace('%%', '%'))}"
        for flag in FLAGS.values()
        for variable in flag.variables[:1]
        if variable not in settings
    }
    given = ("PHALANX_REPLACE", "PHALANX_RUN_FOLDER")
    return {
        "settings": settings | {name: others[name] for name in given},
        "flags": {name: flag for name, flag in flags.items() if name not in given},
        "launch": {name: text for name, text in others.items() if name not in given and name not in flags},
    }


def _markdown(text: str) -> str:
    """Return reST of a docstring as Markdown, without what it says to readers of the code."""
    return re.sub(r"``(.+?)``", r"`\1`", re.sub(r", see `_\w+`", "", text))


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>#|~$])", r"\\\1", text)


def _depend_on_code(directive: SphinxDirective) -> None:
    """Have the page built again when any module of phalanx has changed."""
    for module in Path(phalanx.__file__).parent.rglob("*.py"):
        directive.env.note_dependency(str(module))


class Commands(SphinxDirective):
    """A section for each command: its description, usage and flags."""

    def run(self) -> list[nodes.Node]:
        """Return what the help of each command says."""
        _depend_on_code(self)
        text = "\n".join(line for command in COMMANDS if command for line in _lines_of(command))
        return self.parse_text_to_nodes(text, allow_section_headings=True)


def _lines_of(command: str) -> Iterator[str]:
    parser = parser_of(command)
    yield f"{'##' if ' ' not in command else '###'} {parser.prog}\n"
    yield _escaped((parser.description or "").replace("%%", "%"))
    yield f"\n```text\n{parser.usage}\n```\n\n:::{{program}} {parser.prog}\n:::\n"
    for title, actions in flags_of(parser):
        if title == "Commands" or [action.dest for action in actions] == ["help"]:
            continue
        yield f"**{title}**\n"
        for action in actions:
            names = [name for name in action.option_strings if "_" not in name] or [str(action.metavar or action.dest)]
            value = f" {action.metavar or action.dest.upper()}" if action.nargs != 0 and action.option_strings else ""
            yield f"::::{{option}} {', '.join(name + value for name in names)}"
            yield f"{_escaped((action.help or '').replace('%%', '%'))}\n::::\n"


class Environment(SphinxDirective):
    """A group of environment variables."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return one description for each variable of the group; of flags, a table."""
        _depend_on_code(self)
        group = self.arguments[0]
        found = variables()[group]
        if group != "flags":
            lines = [f"::::{{envvar}} {name}\n{text}\n::::\n" for name, text in found.items()]
        else:
            titles = ("变量", "选项", "含义") if self.config.language == "zh_CN" else ("Variable", "Flag", "Meaning")
            lines = [
                f"| {' | '.join(titles)} |\n|---|---|---|",
                *(f"| `{name}` | {flag} |" for name, flag in found.items()),
            ]
        return self.parse_text_to_nodes("\n".join(lines))


def setup(app) -> dict[str, bool]:
    """Register both directives."""
    app.add_directive("phalanx-commands", Commands)
    app.add_directive("phalanx-environment", Environment)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
