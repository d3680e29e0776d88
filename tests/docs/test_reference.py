"""The reference has every public name, command, flag and environment variable, in both languages."""

from __future__ import annotations

import html
import pkgutil
import re
import shutil
import sys
from pathlib import Path

import pytest

from phalanx import _env, _settings
from tests.docs.blocks import REPOSITORY
from tests.test_docstrings import PACKAGES
from tools.book import LANGUAGES

sys.path.insert(0, str(REPOSITORY / "docs" / "extensions"))
import book_commands

REFERENCE = {language: REPOSITORY / "docs" / language / "reference" for language in LANGUAGES}
SHOWN = re.compile(r"^\.\. auto(?:class|function|exception):: phalanx\.([\w.]+)", re.MULTILINE)
NAMED = re.compile(r"`phalanx\.(\w+(?:\.\w+)*)[`(]")


def public_names() -> set[str]:
    """Return every public name once: in the main package if it is there, else in its own."""
    found: dict[int, str] = {}
    for package in PACKAGES:
        for name in package.__all__:
            thing = getattr(package, name)
            if callable(thing):
                found.setdefault(id(thing), f"{package.__name__}.{name}".removeprefix("phalanx."))
    return {*found.values()}


def pages_with(folder: Path, pattern: re.Pattern[str]) -> list[str]:
    """Return what a pattern finds on all pages of a folder."""
    return [found for page in sorted(folder.rglob("*.md")) for found in pattern.findall(page.read_text())]


def missing_names(folder: Path) -> set[str]:
    """Return the public names that do not stand on any page of a folder."""
    return public_names() - {*pages_with(folder, SHOWN)}


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_public_name_stands_in_the_reference_once(language):
    assert missing_names(REFERENCE[language]) == set()
    assert sorted(pages_with(REFERENCE[language], SHOWN)) == sorted(public_names())


def test_a_public_name_without_a_page_is_noticed(tmp_path):
    reference = Path(shutil.copytree(REFERENCE["en"], tmp_path / "reference"))
    page = reference / "python" / "start.md"
    page.write_text(page.read_text().replace(".. autofunction:: phalanx.spawn\n", ""))
    assert missing_names(reference) == {"spawn"}


def exists(name: str) -> bool:
    """Return whether `phalanx` has an attribute or a module of that dotted name."""
    try:
        pkgutil.resolve_name(f"phalanx.{name}")
    except (AttributeError, ImportError):
        return False
    return True


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_name_on_a_page_exists(language):
    assert {name for name in pages_with(REFERENCE[language].parent, NAMED) if not exists(name)} == set()


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_public_name_stands_in_the_overview(language):
    overview = (REFERENCE[language] / "python.md").read_text()
    assert sorted(re.findall(r"^   phalanx\.([\w.]+)$", overview, re.MULTILINE)) == sorted(public_names())


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_page_of_commands_shows_all(language):
    assert "```{phalanx-commands}\n" in (REFERENCE[language] / "commands.md").read_text()


@pytest.mark.parametrize("command", book_commands.COMMANDS)
def test_the_flags_of_the_reference_are_those_of_the_help(command):
    parser = book_commands.parser_of(command)
    shown = {name for _, flags in book_commands.flags_of(parser) for flag in flags for name in flag.option_strings}
    in_help = re.findall(r"^  (-.*)$", parser.format_help(), re.MULTILINE)
    listed = {name.split()[0] for line in in_help for name in line.split(", ")}
    assert {name for name in shown if "_" not in name} == listed


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_environment_variable_stands_in_the_reference(language):
    groups = pages_with(REFERENCE[language], re.compile(r"^```\{phalanx-environment\} (\w+)$", re.MULTILINE))
    shown = [name for group in groups for name in book_commands.variables()[group]]
    declared = {*map(_settings.variable_of, vars(_settings.Settings()))} | _env.LAUNCH_VARIABLES
    assert sorted(shown) == sorted(declared)


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_site_shows_what_is_generated(site, language):
    folder = site / language / "reference"
    commands, environment = (
        html.unescape((folder / f"{name}.html").read_text()) for name in ("commands", "environment")
    )
    python = "".join(page.read_text() for page in (folder / "python").glob("*.html"))
    for command in book_commands.COMMANDS[1:]:
        flags = [flag for _, flags in book_commands.flags_of(book_commands.parser_of(command)) for flag in flags]
        names = {name for flag in flags for name in flag.option_strings if "_" not in name} - {"-h", "--help"}
        assert {name for name in names if f"{name}</span>" not in commands} == set()
        assert re.search(rf"<h\d>(<a [^>]*>)?phalanx {command}<", commands)
    assert [name for group in book_commands.variables().values() for name in group if name not in environment] == []
    assert [name for name in public_names() if f'id="phalanx.{name}"' not in python] == []
