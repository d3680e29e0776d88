"""Makes ``init_process_group("phalanx")`` work in a script that never imports phalanx.

Through the entry points of the installed package, torch finds :func:`register` (2.14 and newer, on first use of the
name) or :func:`autoload` (every version, at the end of ``import torch``). Nothing heavy is imported before a group is
created, and no error here may break ``import torch``.
"""

from typing import Any


def register() -> None:
    """Register the backend with ``torch.distributed``. Idempotent."""
    import torch.distributed as dist

    if dist.is_available() and "phalanx" not in dist.Backend.backend_list:
        dist.Backend.register_backend("phalanx", _create_group, extended_api=True, devices=["cpu"])
        _watch_rendezvous()


def install_as_default() -> None:
    """Make phalanx, instead of gloo, the backend that torch uses for CPU tensors if the caller names no backend.

    Call this before ``init_process_group()``. It affects this process only.

    Example:
        >>> phalanx.install_as_default()
        >>> group = dist.new_group()
    """
    import torch.distributed as dist

    register()
    dist.Backend.default_device_backend_map["cpu"] = "phalanx"


def replace_gloo() -> None:
    """Use phalanx in place of Gloo, in this process and in the processes that it starts from now on.

    Every group made afterwards that asks for ``gloo``, or for torch's default on the CPU, is phalanx's; the rest of the
    program need not change. Every rank of a job must call this. ``PHALANX_REPLACE=gloo`` and ``phalanx run
    --replace-gloo`` do the same without a change to the script.

    Example:
        >>> phalanx.replace_gloo()
        >>> group = dist.new_group(backend="gloo")  # runs on phalanx
        >>> dist.get_backend(group)
        'gloo'
    """
    from phalanx import _env
    from phalanx._torch import replace

    register()
    _env.update({_env.REPLACE_VARIABLE: "gloo"})
    replace.begin("phalanx.replace_gloo()")


def autoload() -> None:
    """Register the backend at ``import torch``; a failure only prints a line on stderr: it must not break the import.

    In a rank that was executed rather than forked, this also applies the launcher's policy for freed memory.
    """
    try:
        register()
        from phalanx import _env

        environ = _env.environment()
        if environ.get(_env.REPLACE_VARIABLE) or _env.MISTAKEN_FOR_REPLACE in environ:
            from phalanx._torch import replace

            replace.obey()
        if environ.get(_env.VERIFY_VARIABLE):
            from phalanx._torch import unverified

            unverified.watch()
        if _env.ALLOCATION_VARIABLE in environ:
            from phalanx.host.block_pool import obey_launcher

            obey_launcher()
        if _env.is_rank():
            from phalanx.launch.rank import watch_torch
            from phalanx.rendezvous import solo

            solo.watch()
            watch_torch()
        if _env.TRIAL_VARIABLE in environ:
            from phalanx.launch import rank_trial

            rank_trial.begin()
    except Exception as error:
        import sys

        print(
            f"phalanx: can't be set up at import torch; torch continues without it: {error!r}",
            file=sys.stderr,
            flush=True,
        )


def _watch_rendezvous() -> None:
    """Call `phalanx.rendezvous.handler` before torch's own handlers, which wait silently inside native code.

    Also make ``env://`` work under mpirun and other schedulers that do not set RANK.
    """
    from phalanx._torch import rendezvous_handlers

    def watched(torchs: Any) -> Any:
        def handler(url: str, timeout: Any = None, **options: Any) -> Any:
            from phalanx.rendezvous.handler import rendezvous
            from phalanx.session.meeting_point import meet_under_scheduler

            found = meet_under_scheduler() if url.startswith("env:") and "=" not in url else None
            if found is not None:
                return iter([found])
            given = {} if timeout is None else {"timeout": timeout}
            return rendezvous(url, timeout, lambda: torchs(url, **given, **options))

        return handler

    for scheme in rendezvous_handlers.keys() & {"env", "tcp", "file"}:
        rendezvous_handlers[scheme] = watched(rendezvous_handlers[scheme])


def _create_group(options: Any, backend_options: Any, **named: Any) -> Any:
    from phalanx._errors import require_linux

    require_linux()
    from phalanx._torch import shield
    from phalanx._torch.dynamo import postpone_import
    from phalanx.backend.groups import create_group
    from phalanx.rendezvous.solo import wants_others

    # not `launch.rank.watch_torch`, which also records Gloo and for that needs variables that only our launchers set
    shield.watch()
    postpone_import()
    wants_others()  # needed for a group with a store of its own, for which no rendezvous calls this
    return create_group(options, backend_options, **named)
