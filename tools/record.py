"""Record terminals for the documentation: ``python tools/record.py`` runs real commands and writes docs/pictures.

Each recording is the last screen of a command in a pseudo-terminal of 80 columns, run in an empty folder with a link to
the repository's ``examples``. Record again when what these commands print has changed; unlike the drawings, recordings
differ from run to run, so no test compares them. ``python tools/record.py kill`` makes only the recording ``kill``.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import fcntl
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from drawing.terminal import COLUMNS, Screen, svg_of

REPOSITORY = Path(__file__).parents[1]
FOLDER = REPOSITORY / "docs" / "pictures"
_LIMIT_S = 120.0

MISMATCH = """\
import torch
import torch.distributed as dist

dist.init_process_group("phalanx")
loss = torch.ones(4)
if dist.get_rank() == 0:
    dist.broadcast(loss, src=0)  # the mistake: all ranks must call it
dist.all_reduce(loss)
"""


def kill_second_rank(output: str) -> str:
    """Kill rank 1 once the second epoch is over; return the command that a user would have typed, "" before that."""
    pids = re.search(r"processes of the ranks: (\d+) (\d+)", output)
    if pids is None or "epoch 2, step" not in output:
        return ""
    os.kill(int(pids[2]), signal.SIGKILL)
    return f"kill -9 {pids[2]}"


@dataclass(frozen=True)
class Recording:
    command: str
    description: str
    files: dict[str, str] = field(default_factory=dict)
    meddle: Callable[[str], str] | None = None  # acts as another terminal; called until it returns text


RECORDINGS = {
    "demo": Recording(
        "phalanx run --nproc-per-node 2 examples/train_digits.py --epochs 6",
        "A terminal in which two ranks train a small CNN on handwritten digits, epoch by epoch.",
    ),
    "kill": Recording(
        "phalanx run --nproc-per-node 2 --max-restarts 3 \\\n    examples/train_digits.py --epochs 6",
        "A terminal in which a rank of a training job is killed, and both ranks go on from the last snapshot.",
        meddle=kill_second_rank,
    ),
    "mismatch": Recording(
        "phalanx run --nproc-per-node 2 mismatch.py",
        "A terminal in which two ranks call different collectives, and a table says which rank called what, and where.",
        files={"mismatch.py": MISMATCH},
    ),
}


def run_in_terminal(command: list[str], folder: Path, meddle: Callable[[str], str] | None) -> tuple[str, str]:
    """Return what `command` has written to a terminal of 80 columns, and what `meddle` returned meanwhile."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
        os.execvpe(command[0], command, {**kept, "PATH": path, "TERM": "xterm-256color"})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    output, done = "", ""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    deadline = time.monotonic() + _LIMIT_S
    with contextlib.suppress(OSError):  # the terminal's end, once its last process has gone
        while data := os.read(terminal, 65536):
            output += decoder.decode(data)
            if meddle is not None and not done:
                done = meddle(output)
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
    os.close(terminal)
    os.waitpid(pid, 0)
    return output, done


def record(name: str) -> str:
    """Run a recording's command and return the SVG of the last screen."""
    recording = RECORDINGS[name]
    with tempfile.TemporaryDirectory(prefix="record-") as temporary:
        folder = Path(temporary)
        (folder / "examples").symlink_to(REPOSITORY / "examples")
        for file, text in recording.files.items():
            (folder / file).write_text(text)
        output, done = run_in_terminal(shlex.split(recording.command.replace("\\\n", "")), folder, recording.meddle)
    screen = Screen()
    for file in recording.files:
        screen.write(f"\x1b[1m$ tail -n +4 {file}\x1b[0m\r\n")
        tail = subprocess.run(
            ["tail", "-n", "+4"], input=recording.files[file], capture_output=True, text=True, check=True
        )
        screen.write(tail.stdout.replace("\n", "\r\n"))
    shown = recording.command.replace("\n", "\r\n")
    screen.write(f"\x1b[1m$ {shown}\x1b[0m\r\n")
    if done:
        screen.write(f"\x1b[2m# meanwhile, in another terminal: {done}\x1b[0m\r\n")
    screen.write(output)
    text = screen.text()
    for path in (temporary, str(REPOSITORY), os.path.expanduser("~")):
        if path in text:
            raise SystemExit(f"{name}: the screen shows {path}, which is this machine's:\n{text}")
    return svg_of(screen, f"recording: {name}", recording.description)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {', '.join(RECORDINGS)}")
    names = parser.parse_args().names
    if unknown := sorted(set(names) - RECORDINGS.keys()):
        parser.error(f"no such recording: {', '.join(unknown)}")
    for name in names or RECORDINGS:
        (FOLDER / f"recording_{name}.svg").write_text(record(name), encoding="utf-8")


if __name__ == "__main__":
    main()
