"""The hooks that every rank installs in torch, whichever launcher started the rank."""

from __future__ import annotations


def watch_torch() -> None:
    """Record Gloo groups, shield data loaders, and postpone ``torch._dynamo``'s import in this process. Idempotent.

    torch must have been imported, or be at the end of its import. The imports below load the C++ core. They are not at
    the top of the module, because a process that only forks ranks does not need the core.
    """
    from phalanx._torch import shield
    from phalanx._torch.dynamo import postpone_import
    from phalanx.record import gloo

    gloo.watch()
    shield.watch()
    postpone_import()
