"""``phalanx verify-resume``: proves that a script with a Trainer resumes to the same bits."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx import _env
from phalanx._command_line import Parser, UsageError
from phalanx.launch.command.flag_parser import add_flags
from phalanx.launch.command.plan import make_plan


def main(args: Sequence[str]) -> int:
    """Run the command; return 2 for a mistake, and 1 if the results differ."""
    parser = Parser(
        "phalanx verify-resume",
        "phalanx verify-resume --nproc-per-node 2 train.py [args]",
        "Run a script that trains with a Trainer three times: whole, with a rank killed, and preempted and resumed. "
        "Compare the results bit for bit; the exit code is 1 if they differ. Every flag of phalanx run is accepted.",
    )
    add_flags(parser, {})
    try:
        make_plan(args, _env.environment(), parser)
    except UsageError as error:
        return parser.refuse(error)
    from phalanx.train.resume.verification import verify_resume  # brings torch

    return verify_resume(args)
