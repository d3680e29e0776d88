"""``tools/release.py`` names everything that stands against a release, and tags nothing then."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "release.py"
FILES = {
    "pyproject.toml": '[project]\nversion = "1.2.0"\n',
    "src/phalanx/__init__.py": '__version__ = "1.2.0"\n',
    "CHANGELOG.md": "# Changelog\n\n## [1.2.0] - 2026-12-01\n- All.\n",
}


def git(folder, *command):
    names = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", *names, *command], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path, monkeypatch):
    for variable, value in {"NAME": "a", "EMAIL": "a@b"}.items():
        monkeypatch.setenv(f"GIT_COMMITTER_{variable}", value)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def commit(folder):
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "all")


def release(step, repository):
    command = [sys.executable, TOOL, step, "--repository", repository]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_release_is_tagged_once_and_the_upload_is_left_to_the_maintainer(repository):
    assert release("check", repository).stdout == "1.2.0 can be released\n"
    assert git(repository, "tag") == ""
    assert release("tag", repository).stdout.splitlines()[1:] == [
        "    git push origin v1.2.0",
        "    twine upload dist/*",
    ]
    assert git(repository, "tag") == "v1.2.0\n"
    again = release("tag", repository)
    assert (again.returncode, again.stderr) == (1, "the tag v1.2.0 exists: raise the version\n")


OTHER_CODE = "pyproject.toml says version 1.2.0, src/phalanx/__init__.py 1.1.0"
OTHER_HEADING = 'CHANGELOG.md begins with "{}"; right: "[1.2.0] - YYYY-MM-DD"'


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("src/phalanx/__init__.py", '__version__ = "1.1.0"', OTHER_CODE),
        ("CHANGELOG.md", "## [Unreleased]", OTHER_HEADING.format("[Unreleased]")),
        ("CHANGELOG.md", "## [1.1.0] - 2026-01-01", OTHER_HEADING.format("[1.1.0] - 2026-01-01")),
    ],
)
def test_what_contradicts_the_version_is_named(repository, name, text, said):
    (repository / name).write_text(f"{text}\n")
    commit(repository)
    done = release("tag", repository)
    assert (done.returncode, done.stderr) == (1, f"{said}\n")
    assert git(repository, "tag") == ""


def test_uncommitted_changes_are_named(repository):
    (repository / "new").write_text("")
    done = release("check", repository)
    assert (done.returncode, done.stderr) == (1, "there are uncommitted changes:\n?? new\n")
