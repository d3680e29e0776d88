"""Draw the pictures of the documentation: ``python tools/draw.py`` writes all of them to docs/pictures.

``python tools/draw.py all_reduce ring_all_reduce`` writes only these two. Each picture is drawn by one function in
`drawing`; tests/docs/test_pictures.py checks that the committed files are up to date.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from drawing import collectives, losses, machinery, speed, training
from drawing.canvas import PICTURES, svg_of

MODULES = (collectives, training, machinery, losses, speed)  # importing them registers their pictures
FOLDER = Path(__file__).parents[1] / "docs" / "pictures"


def is_current(name: str) -> bool:
    """Return whether the committed file of a picture is up to date."""
    file = FOLDER / f"{name}.svg"
    return file.exists() and file.read_text(encoding="utf-8") == svg_of(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"pictures to draw, default all: {', '.join(PICTURES)}"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a committed picture differs")
    given = parser.parse_args()
    if unknown := sorted(set(given.names) - PICTURES.keys()):
        parser.error(f"no such picture: {', '.join(unknown)}")
    names = given.names or PICTURES
    if given.check:
        stale = [name for name in names if not is_current(name)]
        sys.exit(f"not what tools/draw.py draws: {', '.join(stale)}; run it" if stale else 0)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in names:
        (FOLDER / f"{name}.svg").write_text(svg_of(name), encoding="utf-8")


if __name__ == "__main__":
    main()
