"""Comments, docstrings and pages for maintainers name files, benchmarks and make targets that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
FOLDERS = "|".join(("src/phalanx", "csrc", "tests", "model", "docs/en", "tools", "examples", "bench"))
FILE = re.compile(rf"(?<![\w/.-])(?:{FOLDERS})/[\w/-]+\.\w+\b")
BENCH = re.compile(r"python -m (bench[.\w]*\w)")
TARGET = re.compile(r"`make ([a-z-]+)")
ROOM = re.compile(r"`([a-z_]+/[\w/]+\.py)`")  # in docs/design.md: below src/phalanx
TARGETS = {*re.findall(r"^([a-z-]+)(?: [a-z-]+)*:", (REPO / "Makefile").read_text(), re.MULTILINE)}
TARGETS |= {"slow", "cluster"}  # one rule
SOURCES = [
    *(path for folder in ("src/phalanx", "csrc", "tools", "bench") for path in (REPO / folder).rglob("*")),
    *(
        REPO / name
        for name in ("docs/design.md", "CONTRIBUTING.md", "GOVERNANCE.md", "model/README.md", "tests/README.md")
    ),
    *(REPO / "docs").glob("??/contributing/*.md"),
    *(REPO / "docs").glob("??/how_it_works/*.md"),
]


def missing(text: str) -> list[str]:
    files = [name for name in FILE.findall(text) if not (REPO / name).exists()]
    benches = [name for name in BENCH.findall(text) if not bench(name).exists()]
    return [*files, *benches, *(f"make {name}" for name in TARGET.findall(text) if name not in TARGETS)]


def bench(module: str) -> Path:
    path = REPO / module.replace(".", "/")
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


@pytest.mark.parametrize(
    "folder", sorted({path.parent for path in SOURCES}), ids=lambda path: str(path.relative_to(REPO))
)
def test_what_is_named_exists(folder: Path) -> None:
    for path in SOURCES:
        if path.parent == folder and path.suffix in (".py", ".h", ".cpp", ".md"):
            assert missing(path.read_text()) == [], path.relative_to(REPO)


def test_the_map_names_files_of_its_rooms() -> None:
    names = ROOM.findall((REPO / "docs" / "design.md").read_text())
    assert len(names) > 30
    assert [
        name for name in names if not any((base / name).is_file() for base in (REPO, REPO / "src" / "phalanx"))
    ] == []
