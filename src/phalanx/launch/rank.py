"""What every process does with torch once it is a rank, whoever has started it."""

from __future__ import annotations


def watch_torch() -> None:
    """Record groups of Gloo, shield data loaders, and postpone ``torch._dynamo``, in this process. Idempotent.

    torch must have been imported, or be about to end its import. The imports below load the core, which a process that
    only forks ranks does without.
    """
    from phalanx._torch import shield
    from phalanx._torch.dynamo import postpone_import
    from phalanx.record import gloo

    gloo.watch()
    shield.watch()
    postpone_import()
