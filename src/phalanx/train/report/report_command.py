"""``phalanx report``: writes the report of a run."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx._command_line import Parser, UsageError
from phalanx._text import complain
from phalanx.train.report.report import write_report


def main(args: Sequence[str]) -> int:
    """Run the command, and return its exit code: 2 for a usage error, or if there is no run to report on."""
    about = "Write FOLDER/report.html: one page with the state, curves, timings and restarts of a run."
    parser = Parser("phalanx report", "phalanx report FOLDER", about)
    parser.add_argument("folder", metavar="FOLDER", help="folder of the run, such as runs/train")
    try:
        page = write_report(parser.parse_args(args).folder)
    except UsageError as error:
        return parser.refuse(error, args)
    except (OSError, ValueError) as error:
        complain(f"phalanx report: {error}")
        return 2
    print(page)
    return 0
