"""Refuses to meet in a process that only imports the script again.

A process that multiprocessing starts with "spawn" or "forkserver", such as a DataLoader's worker, imports the script
before it does its work. A script without ``if __name__ == "__main__":`` then trains once more in each worker: with the
rank's number, so that the roll call would say that two processes claim it, which is not the mistake.
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
