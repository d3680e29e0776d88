"""``phalanx run``: the command line becomes a job, which runs here or is forked from a warm process."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx import _env
from phalanx._command_line import UsageError
from phalanx._text import complain
from phalanx.launch.command.flag_parser import run_parser
from phalanx.launch.command.plan import Plan, make_plan
from phalanx.launch.command.run import run


def main(args: Sequence[str]) -> int:
    """Run the job and return the exit code for the shell."""
    parser = run_parser()
    try:
        plan = make_plan(args, _env.environment(), parser)
    except UsageError as error:
        return parser.refuse(error, args)
    _env.update(plan.variables)
    if plan.is_dry:
        print(plan.describe())
        if plan.is_warm:
            print(f"phalanx run: {_run_warm(plan, args, is_trial=True)}")
        return 0
    if plan.is_warm:
        complain(f"phalanx run: {_run_warm(plan, args)}")
    return run(plan.job)


def _run_warm(plan: Plan, args: Sequence[str], *, is_trial: bool = False) -> str:
    """Let a warm process run the job, then end this process with the job's status. If none can run it, return why.

    With `is_trial`, nothing is run, and the return value says what would be done.
    """
    from phalanx.launch.warm import starter  # not at the top: a cold start does not need it

    if not plan.job.preload:
        return f"{starter.NOT_WARM}: each rank imports torch for itself"
    if is_trial:
        return starter.start_in_words("run", args, plan.shared)
    return starter.run_warm("run", args, plan.shared, plan.job.head.settings)
