"""The steps around the build of a release: ``make release`` calls ``check`` before the build and ``tag`` after it.

Neither step uploads anything. See ``docs/en/contributing/releases.md``.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def main() -> None:
    """Run one step; if the release can't be made, show every reason and exit with code 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["check", "tag"], help="what to do")
    parser.add_argument("--repository", type=Path, default=REPOSITORY, help="checkout (default: this one)")
    options = parser.parse_args()
    version = version_of(options.repository)
    if problems := problems_of(options.repository, version):
        raise SystemExit("\n".join(problems))
    if options.step == "check":
        print(f"{version} can be released")
        return
    git(options.repository, "tag", "-a", f"v{version}", "-m", f"Phalanx {version}")
    print(f"Tagged v{version}. What is left is yours:\n    git push origin v{version}\n    twine upload dist/*")


def version_of(repository: Path) -> str:
    """Return the version in ``pyproject.toml``."""
    return _found(r'^version = "(.+)"$', repository / "pyproject.toml")


def problems_of(repository: Path, version: str) -> list[str]:
    """Return why `version` can't be released from the checkout as it stands."""
    problems = []
    in_code = _found(r'^__version__ = "(.+)"$', repository / "src" / "phalanx" / "__init__.py")
    if in_code != version:
        problems.append(f"pyproject.toml says version {version}, src/phalanx/__init__.py {in_code}")
    heading = _found(r"^## (.+)$", repository / "CHANGELOG.md")
    if not re.fullmatch(rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", heading):
        problems.append(f'CHANGELOG.md begins with "{heading}"; right: "[{version}] - YYYY-MM-DD"')
    if changed := git(repository, "status", "--porcelain"):
        problems.append(f"there are uncommitted changes:\n{changed}")
    if git(repository, "tag", "--list", f"v{version}"):
        problems.append(f"the tag v{version} exists: raise the version")
    return problems


def git(repository: Path, *command: str) -> str:
    """Run a git command in the checkout and return what it printed."""
    done = subprocess.run(["git", *command], cwd=repository, text=True, stdout=subprocess.PIPE, check=True)
    return done.stdout.rstrip()


def _found(pattern: str, path: Path) -> str:
    match = re.search(pattern, path.read_text(), re.MULTILINE)
    return match[1] if match else "nothing"


if __name__ == "__main__":
    main()
