"""``phalanx warm``: lists or ends the warm processes of this user, from which ``phalanx run --warm`` forks jobs.

A warm process answers with a description of itself (see `starter.describe`). A process that does not answer is listed
with its pid and state. `server` decides when a warm process ends on its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx._command_line import Parser, UsageError
from phalanx._text import columns, counted
from phalanx.launch.warm import starter
from phalanx.wire import places


def main(args: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    about = (
        "phalanx run --warm forks a job from a process that has imported torch, and starts that process if there is "
        "none that fits. It ends ten minutes after its last job. Running jobs do not need it."
    )
    parser = Parser("phalanx warm", "phalanx warm --list|--stop", about)
    parser.add_argument("--list", action="store_true", help="show this user's warm processes")
    parser.add_argument("--stop", action="store_true", help="end them; running jobs continue")
    try:
        given = parser.parse_args(args)
        if given.list == given.stop:
            raise UsageError("name --list or --stop")
    except UsageError as error:
        return parser.refuse(error, args)
    if given.stop:
        pids = [starter.stop(path) for path in places.sockets()]
        print(*[f"ended pid {pid}" for pid in pids if pid is not None] or ["no warm process"], sep="\n")
        return 0
    answers = [found for path in places.sockets() if (found := starter.describe(path)) is not None]
    if not answers:
        print("no warm process")
        return 0
    titles = ("pid", "jobs", "running", "threads", "ends in", "interpreter")
    print(*columns([titles, *map(_row, answers)]), sep="\n")
    return 0


def _row(found: dict[str, object]) -> tuple[str, ...]:
    if "state" in found:
        return (str(found["pid"]), "-", "-", "-", "-", str(found["state"]))
    left = "-" if found["living"] else counted(round(float(str(found["left_s"]))), "second")
    return (*(str(found[name]) for name in ("pid", "jobs", "living", "threads")), left, str(found["executable"]))
