"""``phalanx check train.py``: tests whether all ranks make the same calls, before the job is started for real."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

from phalanx import _env
from phalanx._command_line import Parser, UsageError
from phalanx._text import complain, is_terminal
from phalanx.diagnose.check.result import FOUND, Result, as_json, result_of, sequences
from phalanx.diagnose.check.watch import Watch
from phalanx.host.cpus import read_machine
from phalanx.launch.command.flag_parser import add_flags, without_flags
from phalanx.launch.command.flag_values import number
from phalanx.launch.command.flags import Flag
from phalanx.launch.command.plan import count_local_ranks, make_plan, read_command
from phalanx.tune.trial_folder import folder_of_jobs
from phalanx.tune.trial_job import end_on_signals

_TAIL_LINES = 20
_CHANGED = ("--nproc-per-node", "--log-dir", "--shutdown-timeout", "--max-restarts")
_count = number(int, 1, "a whole number of at least 1")
_seconds = number(float, 1, "seconds from 1 to 86400", most=86400)


def _ranks(text: str) -> int:
    return int(_count(text)) if text else 0


OWN_FLAGS = (
    Flag("nproc", "number of ranks, however few cores there are; the same as --nproc-per-node", _ranks, "N"),
    Flag("steps", "optimizer steps that each rank takes", _count, "N", "2"),
    Flag("calls", "calls of each rank that are enough, for scripts without an optimizer", _count, "N", "1000"),
    Flag("seconds", "limit for the whole check", _seconds, "SECONDS", "120"),
    Flag(
        "stall-after", "seconds without progress after which waiting ranks count as stalled", _seconds, "SECONDS", "5"
    ),
    Flag("json", "print everything as JSON: the result and each rank's calls", str),
    Flag("resume", "check instead whether the script, killed or preempted, resumes to the same bits", str),
)


def main(args: Sequence[str]) -> int:
    """Run ``phalanx check`` with these arguments, and return its exit code."""
    parser = Parser(
        "phalanx check",
        "phalanx check --nproc 8 train.py [args]",
        "Run the first steps of a script on real ranks of this host, and compare what each rank calls. Names the first "
        "call in which ranks differ, and who waits for whom where they wait. The script runs as it is, in a run folder "
        "of its own, and is ended then. Exit code: 0 if all ranks made the same calls, 1 if something is wrong, 3 if "
        "nothing could be compared. Every flag of phalanx run is accepted. With --resume, a script that trains with a "
        "Trainer runs three times: whole, with a rank killed, and preempted and started again. The last checkpoints "
        "are compared bit for bit, and the exit code is 1 if they differ.",
    )
    add_flags(parser, {"Check": OWN_FLAGS})
    try:
        argv = _nproc_in_front(args)
        settings, target, _ = read_command(argv, _env.environment(), parser=parser, also=OWN_FLAGS)
        if settings["nnodes"].value != (1, 1):
            raise UsageError("--nnodes: phalanx check runs on one machine")
        resumes = settings["resume"].is_given
        for flag in OWN_FLAGS if resumes else ():
            if settings[flag.name].is_given and flag.name not in ("nproc", "resume"):
                raise UsageError(f"--resume runs the whole script; --{flag.name} is for its first steps")
        changed = _CHANGED[:1] if resumes else _CHANGED
        own = (f"--{flag.name}" for flag in OWN_FLAGS)
        words = without_flags((*changed, *own), argv, target, ["--json", "--resume"])
        asked = settings["nproc" if settings["nproc"].is_given else "nproc-per-node"]
        num_ranks = count_local_ranks(asked, read_machine(), _env.environment())[1]
        words = ["--nproc-per-node", str(num_ranks), *words]
        make_plan(words, _env.environment(), parser)  # refuses a command line that could not start
    except UsageError as error:
        return parser.refuse(error, args)
    if resumes:
        from phalanx.diagnose.check.resume import check_resume  # not at the top: it imports torch

        return check_resume(words)
    end_on_signals()
    try:
        return _check(words, target, num_ranks, {name: setting.value for name, setting in settings.items()})
    except BrokenPipeError:
        raise
    except OSError as error:  # there is no room for what the job writes
        complain(f"phalanx check: {error}; TMPDIR names another folder for the trial")
        return FOUND


def _nproc_in_front(argv: Sequence[str]) -> list[str]:
    """Return the command line; a ``--nproc N`` directly after the script is moved in front of the script."""
    words = list(argv)
    for at in range(1, len(words)):
        is_script = words[at - 1].endswith(".py") and not words[at - 1].startswith("-")
        if is_script and words[at] == "--nproc" and at + 1 < len(words):
            return ["--nproc", words[at + 1], *words[:at], *words[at + 2 :]]
        if is_script:
            break
    return words


def _check(words: Sequence[str], target: Sequence[str], num_ranks: int, settings: dict[str, Any]) -> int:
    began_s = time.monotonic()
    with folder_of_jobs() as folder:
        watch = Watch(
            words, f"{folder}/job", num_ranks,
            num_steps=settings["steps"], num_calls=settings["calls"], stall_s=settings["stall-after"],
        )  # fmt: skip
        try:
            record, end = watch.run(began_s + settings["seconds"])
        finally:
            watch.close()
        printed = [
            line for line in watch.printed.rstrip().splitlines() if folder not in line
        ]  # without lines that name the folder, which is deleted at the end
    result = result_of(record, end, num_ranks, settings["steps"])
    if settings["json"]:
        print(json.dumps(as_json(record, result, end), indent=1))
        return result.code
    for line in _cropped(sequences(record), len(result.evidence) + len(printed)):
        print(line)
    _tell(result, printed, f"{shlex.join(target)}, {time.monotonic() - began_s:.0f} s")
    if not record.is_whole:
        print("only the last calls were compared: a rank made more than its black box holds")
    return result.code


def _cropped(calls: Sequence[str], num_others: int) -> Sequence[str]:
    """Return as many lines of calls as fit the terminal beside `num_others` other lines; without a terminal, all."""
    most = max(shutil.get_terminal_size().lines - num_others - 4, 6)
    if not is_terminal(sys.stdout) or len(calls) <= most:
        return calls
    first, last = calls[: most // 2], calls[len(calls) - (most - most // 2 - 1) :]
    return [*first, f"  ... {len(calls) - len(first) - len(last)} more lines: add | less to see all", *last]


def _tell(result: Result, printed: Sequence[str], of_what: str) -> None:
    if result.kind in ("failed", "unknown"):
        for line in printed[-_TAIL_LINES:]:
            print(line, file=sys.stderr)
    print(f"phalanx check: {result.words} ({of_what})")
    for line in result.evidence:
        print(f"  {line}")
