"""Phalanx in the place of Gloo: every group that asks for ``gloo``, or for torch's CPU default, is phalanx's.

Nothing else changes: the name, the tables that programs look into, `ProcessGroupGloo` itself. A group that phalanx
can't make is Gloo's, and a line on stderr says why.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from phalanx import _env, _in_place, _torch

_GLOO = "gloo"
_log = logging.getLogger("phalanx")


def obey() -> None:
    """Put phalanx in the place of what PHALANX_REPLACE names; an unknown word becomes a line on stderr."""
    word = _env.environment().get(_env.REPLACE_VARIABLE, "")
    try:
        is_wanted = _env.replaces_gloo(word)
    except ValueError as error:
        return _in_place.say_once(f"{_env.REPLACE_VARIABLE} {error}, got {word!r}: Gloo stays")
    if is_wanted:
        begin(_env.REPLACE_VARIABLE)


def begin(who: str) -> None:
    """Put phalanx, which torch knows already, in the place of Gloo in this process.

    Args:
        who: Origin of the wish, which ``phalanx doctor`` shows.
    """
    import torch.distributed as dist

    if _in_place.origin():
        return
    if not dist.is_available() or not dist.is_gloo_available():
        _in_place.say_once(f"{who}: this torch is built without Gloo, so there is nothing to replace")
        return
    _note_direct_uses(dist.ProcessGroupGloo)
    (_AsPlugin if _torch.version() >= (2, 14) else _AsStandIn).install()  # last: nothing is replaced by halves
    _in_place.note(who)
    if dist.is_initialized() and _GLOO in str(dist.get_backend_config()):
        _in_place.say_once(f"{who}: the groups that exist already stay on Gloo; call it before init_process_group")


class _AsPlugin:
    """From torch 2.14 on: Gloo is a plugin, looked up by name, and the first to register the name has it."""

    @classmethod
    def install(cls) -> None:
        from torch.distributed import Backend, ProcessGroup

        devices = Backend.backend_capability[_GLOO]
        kind = ProcessGroup.BackendType.GLOO
        if _env.wants_torchs_records():
            _torch.self_recording_backends.discard(_GLOO)
        Backend.register_backend(_GLOO, cls._create, extended_api=True, devices=devices, _backend_type=kind)

    @classmethod
    def _create(cls, options: Any, backend_options: Any) -> Any:
        if getattr(options, "enable_reconfigure", False):  # from torch 2.15 on
            _in_place.say_once("a group with enable_reconfigure stays on Gloo: phalanx can't change its ranks")
            return cls._gloo(options, enable_reconfigure=True)
        return _make(options, backend_options) or cls._gloo(options)

    @staticmethod
    def _gloo(options: Any, **asked: Any) -> Any:
        """Return what torch would have made."""
        from torch.distributed import ProcessGroupGloo

        gloo = ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout, **asked)
        gloo.options.global_ranks_in_group = options.global_ranks_in_group
        gloo.options.group_name = options.group_id
        return gloo


class _AsStandIn:
    """torch 2.11 to 2.13: stands where torch finds `ProcessGroupGloo` while it makes a group, and makes phalanx's.

    Args:
        gloo: torch's class.
        options: Fields of torch's ``_DistributedBackendOptions`` that are known before the group is made.
        backend_options: The user's ``pg_options``.
    """

    def __init__(self, gloo: Any, options: SimpleNamespace, backend_options: Any) -> None:
        self._gloo, self._options, self._backend_options = gloo, options, backend_options

    @classmethod
    def install(cls) -> None:
        _torch.wrap_making_of_groups(cls._wrap)

    @classmethod
    def _wrap(cls, torchs: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(torchs)

        def new_process_group_helper(*args: Any, **named: Any) -> Any:
            from torch.distributed import ProcessGroupGloo

            asked = signature.bind(*args, **named).arguments
            options = SimpleNamespace(
                group_id=asked["group_name"], global_ranks_in_group=asked["global_ranks_in_group"]
            )
            with _found_as_gloo(cls(ProcessGroupGloo, options, asked.get("backend_options"))):
                return torchs(*args, **named)

        return new_process_group_helper

    def __call__(self, store: Any, rank: int, size: int, *, timeout: Any) -> Any:
        options = SimpleNamespace(store=store, group_rank=rank, group_size=size, timeout=timeout, **vars(self._options))
        with _found_as_gloo(self._gloo):  # the group has one inside
            group = _make(options, self._backend_options)
        if group is None:
            return self._gloo(store, rank, size, timeout=timeout)
        group.options = SimpleNamespace()  # in which torch notes ranks and name
        return group

    def __instancecheck__(self, instance: object) -> bool:
        """Whether torch may take `instance` for what it has asked for."""
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gloo, name)


@contextlib.contextmanager
def _found_as_gloo(found: Any) -> Iterator[None]:
    """Let torch find `found` under the name of ProcessGroupGloo."""
    from torch.distributed import distributed_c10d

    c10d: Any = distributed_c10d
    before, c10d.ProcessGroupGloo = c10d.ProcessGroupGloo, found
    try:
        yield
    finally:
        c10d.ProcessGroupGloo = before


def _make(options: Any, backend_options: Any) -> Any:
    """Return phalanx's group; None if this one is Gloo's."""
    create: Any = _torch.backend_plugins["PHALANX"].creator_fn
    try:
        return create(options, backend_options, own=_GLOO)
    except ImportError as error:
        _in_place.say_once(f"can't be loaded, so Gloo goes on itself: {error}")
        return None


def _note_direct_uses(gloo: Any) -> None:
    """Log it, at debug level, if a program makes a `ProcessGroupGloo` by name, which stays what it is."""
    made = gloo.__init__

    def __init__(self: Any, *args: Any, **named: Any) -> None:
        maker = str(sys._getframe(1).f_globals.get("__name__"))
        if _log.isEnabledFor(logging.DEBUG) and maker.partition(".")[0] != "phalanx":
            _log.debug("%s makes a ProcessGroupGloo by name, which stays Gloo", maker)
        made(self, *args, **named)

    gloo.__init__ = __init__
