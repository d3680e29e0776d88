"""Refuses to meet in a process that only imports the script again.

A process that multiprocessing starts with "spawn" or "forkserver", such as a DataLoader's worker, imports the script
before it does its work. If the script has no ``if __name__ == "__main__":``, this import starts the training once more,
with the rank's number. The roll call would then report that two processes claim the same rank, which would hide the
real mistake.
"""

from __future__ import annotations

import multiprocessing


def refuse_to_meet_again(call: str) -> None:
    """Raise an error if this process is one of multiprocessing that is still importing the script.

    Args:
        call: Function that the script has called.

    Raises:
        RuntimeError: The process is still importing the script.
    """
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False):
        raise RuntimeError(
            f"{call}: this process is no rank: it is {process.name}, which a rank has started, such as a DataLoader's "
            'worker, and it is importing the script again. Put what trains under if __name__ == "__main__": in the '
            "script. See: phalanx explain dataloader-worker"
        )
