"""The commands that look at jobs, called in this process: a start of Python for each would take the longer part."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
from pathlib import Path

from phalanx import cli


def asked(folder: Path, *command: object) -> subprocess.CompletedProcess[str]:
    """Return what ``phalanx COMMAND`` says in a folder, and its exit code."""
    words = [*map(str, command)]
    before = os.getcwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            code = cli.main(words)
    finally:
        os.chdir(before)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())
