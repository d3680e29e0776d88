"""Phalanx in the place of Gloo: every group that asks for ``gloo``, or for torch's CPU default, is phalanx's.

``PHALANX_REPLACE=gloo`` takes effect at the end of ``import torch``, and thus in every process of a job and before any
group is made. From torch 2.14 on, Gloo is a plugin that torch looks up by name and registers only if the name is free;
phalanx registers the name first. Older versions call `ProcessGroupGloo` in `_new_process_group_helper`; see `stand_in`.

The backend's name, torch's tables of backends, which programs may read, and `ProcessGroupGloo` itself do not change.
Any failure (an ImportError while a group is made, an unknown word in the variable, a plugin that can't be set up)
prints a line on stderr, and torch makes its own Gloo. Only the last step of the replacement takes effect, so Gloo is
never replaced only in part.

**A rank without the replacement** waits inside Gloo, where other ranks can't reach it. But its Gloo has written an
address into the group's store. A rank whose wait for that rank times out finds the address in the store, and its error
says that the missing rank uses Gloo. If the ranks compare their records when they meet, all ranks see the difference at
once, because each record says whether its rank replaces Gloo.

**torchcomms:** if it is installed and enabled, torch gives it precedence over any plugin; a line on stderr says so.

**Tensors of a GPU.** Gloo accepts them in collectives, though not in messages. The ranks make a real Gloo group at the
first collective on GPU tensors, which all ranks call. Before they do so, a barrier reports any rank that called
something else. CPU and GPU share one backend, because torch would drop a second backend of type GLOO.

If the variable is set, every ``import torch`` runs this module; ``python -m bench.imports`` measures the cost.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from phalanx import _env, _torch

_GLOO = "gloo"
_log = logging.getLogger("phalanx")
_origins: list[str] = []
_said: set[str] = set()


def origin() -> str:
    """Return what replaced Gloo: ``PHALANX_REPLACE`` or ``phalanx.replace_gloo()``; "" if Gloo is not replaced."""
    return _origins[0] if _origins else ""


def say_once(line: str) -> None:
    """Print a line on stderr, unless this process has printed it before."""
    if line not in _said:
        _said.add(line)
        print(f"phalanx: {line}", file=sys.stderr, flush=True)


def obey() -> None:
    """Replace Gloo if PHALANX_REPLACE asks for it; if the variable holds an unknown word, print a line on stderr."""
    environ = _env.environment()
    word = environ.get(_env.REPLACE_VARIABLE, "")
    if _env.MISTAKEN_FOR_REPLACE in environ and not word:
        return say_once(
            f"{_env.MISTAKEN_FOR_REPLACE} is not a variable of phalanx: set {_env.REPLACE_VARIABLE}=gloo; Gloo is not "
            "replaced"
        )
    try:
        is_wanted = _env.replaces_gloo(word)
    except ValueError as error:
        return say_once(f"{_env.REPLACE_VARIABLE} {error}, got {word!r}: Gloo is not replaced")
    if is_wanted:
        begin(_env.REPLACE_VARIABLE)


def obey_script() -> None:
    """Call `obey` again when a script imports torch in a rank whose torch was already loaded before the script ran.

    Since then, the script may have set PHALANX_REPLACE.
    """
    if _env.environment().get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
        try:
            obey()
        except Exception as error:  # an error here must not break the script's import
            say_once(f"{_env.REPLACE_VARIABLE} can't be obeyed at import torch: {error!r}")


def begin(who: str) -> None:
    """Put phalanx in the place of Gloo in this process; phalanx must be registered as a backend already.

    Args:
        who: Variable or function that asks for the replacement; ``phalanx doctor`` shows it.
    """
    import torch.distributed as dist

    if _origins:
        return
    if not dist.is_available() or not dist.is_gloo_available():
        say_once(f"{who}: this torch is built without Gloo, so there is nothing to replace")
        return
    _note_direct_uses(dist.ProcessGroupGloo)
    if _torch.version() >= (2, 14):
        _AsPlugin.install()
    else:
        from phalanx._torch.stand_in import install

        install(_make)
    _origins.append(who)
    if _env.may_use_torchcomms() and _torch.uses_torchcomms():
        say_once(
            f"{who}: torchcomms makes the groups that ask for Gloo, if it has a Gloo; "
            "unset TORCH_DISTRIBUTED_USE_TORCHCOMMS"
        )
    if dist.is_initialized() and _GLOO in str(dist.get_backend_config()):
        say_once(f"{who}: the groups that exist already stay on Gloo; call it before init_process_group")


class _AsPlugin:
    """The replacement from torch 2.14 on, where Gloo is a plugin: torch uses the first backend registered as gloo."""

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
        return _make(options, backend_options) or cls._gloo(options)

    @staticmethod
    def _gloo(options: Any) -> Any:
        """Return the Gloo group that torch would have made."""
        from torch.distributed import ProcessGroupGloo

        asks = getattr(options, "enable_reconfigure", False)  # exists from torch 2.14 on
        asked = {"enable_reconfigure": True} if asks else {}
        gloo = ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout, **asked)
        gloo.options.global_ranks_in_group = options.global_ranks_in_group
        gloo.options.group_name = options.group_id
        return gloo


def _make(options: Any, backend_options: Any) -> Any:
    """Return a group of phalanx in place of a Gloo group; if phalanx can't be loaded, print why and return None."""
    create: Any = _torch.backend_plugins["PHALANX"].creator_fn
    try:
        return create(options, backend_options, own=_GLOO)
    except ImportError as error:
        say_once(f"can't be loaded, so Gloo is used: {error}")
        return None


def _note_direct_uses(gloo: Any) -> None:
    """Log at debug level when a program makes a `ProcessGroupGloo` by name, because such a group is not replaced."""
    made = gloo.__init__

    def __init__(self: Any, *args: Any, **named: Any) -> None:
        maker = str(sys._getframe(1).f_globals.get("__name__"))
        if _log.isEnabledFor(logging.DEBUG) and maker.partition(".")[0] != "phalanx":
            _log.debug("%s makes a ProcessGroupGloo by name, which stays Gloo", maker)
        made(self, *args, **named)

    gloo.__init__ = __init__
