"""What runs on a rank when its group fails, before the failure is raised there: torch's abort hooks.

NCCL runs them in its watchdog, and may run them twice for one failure. Here whoever waits meets the failure, and every
failure becomes an exception in one place, `wording.error_of`, which runs the hooks of the group first. So they run in
the thread that is about to raise, once in the life of a group, and also before this rank's own ``abort()``. A second
thread that meets the failure waits for them, because it may be the one that ends the process. The other ranks are told
of the failure meanwhile: within a host the core publishes it in shared memory, before Python hears of it.

The core knows its group by name only, so hooks are found by that, as `core_failures` finds groups on several hosts.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable

from phalanx._errors import Failure
from phalanx._text import class_and_message
from phalanx.backend.deadlines import HOOKS_S

_ELSEWHERE = frozenset({"forked", "nested", "nested_wait", "destroyed"})
"""Kinds of failures of a call whose group goes on, or that this rank has left."""

_of_group: weakref.WeakValueDictionary[tuple[int, str], AbortHooks] = weakref.WeakValueDictionary()


class AbortHooks:
    """The abort hooks of one group on this rank, and the failure that they have been run for.

    Args:
        group: Name of the group in messages.

    Attributes:
        failure: First failure of the group that this rank has met; None: none so far.
    """

    def __init__(self, group: str) -> None:
        self._group = group
        self.failure: Failure | None = None
        self._hooks: dict[int, Callable[[], object]] = {}
        self._lock = threading.RLock()  # reentrant: a hook may call the group, which fails again
        self._has_run = False
        _of_group[os.getpid(), group] = self

    def register(self, hook_id: int, hook: Callable[[], object]) -> None:
        """Have `hook()` run before a failure of the group is raised; a hook of the same number is replaced.

        Raises:
            TypeError: `hook` can't be called.
        """
        if not callable(hook):
            raise TypeError(f"register_abort_hook() takes a function without arguments, got {hook!r}")
        self._hooks[hook_id] = hook

    def unregister(self, hook_id: int) -> None:
        """Drop a hook. Nothing happens if there is none of that number, as in NCCL."""
        self._hooks.pop(hook_id, None)

    def meet(self, failure: Failure) -> None:
        """Note the failure of the group if it is the first, and run all hooks in the order of their numbers, once.

        Raises nothing: native code waits for the error, and what hooks look into has failed.
        """
        self.failure = self.failure or failure
        if not self._lock.acquire(timeout=HOOKS_S):  # a hook that hangs in another thread keeps no error back
            return
        try:
            if self._has_run:
                return
            self._has_run = True
            for number, hook in sorted(self._hooks.items(), key=lambda item: item[0]):
                try:
                    hook()
                except BaseException as error:
                    text = f"abort hook {number} of group '{self._group}' raised {class_and_message(error)}"
                    print(f"phalanx: {text}", file=sys.stderr, flush=True)
        finally:
            self._lock.release()

    def renew(self) -> None:
        """Wait for another failure, because the group has got other ranks; the hooks stay."""
        self.failure, self._has_run = None, False
        _of_group[os.getpid(), self._group] = self

    def close(self) -> None:
        """Drop all hooks, because this rank leaves the group."""
        self._hooks.clear()
        if _of_group.get((os.getpid(), self._group)) is self:
            del _of_group[os.getpid(), self._group]


def run_hooks_of(failure: Failure) -> None:
    """Run the abort hooks of the group that has failed, if it is a group of this process and has ended."""
    found = failure.cause if failure.kind == "unusable" else failure
    if found is None or found.kind in _ELSEWHERE:
        return
    hooks = _of_group.get((os.getpid(), failure.group))
    if hooks is not None:
        hooks.meet(found)
