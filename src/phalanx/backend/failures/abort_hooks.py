"""torch's abort hooks: functions that run on a rank when its group fails, before the failure is raised there.

NCCL runs them in its watchdog, and may run them twice for one failure. In Phalanx, the waiting thread itself notices
the failure, and every failure becomes an exception in one place, `wording.error_of`, which first runs the group's
hooks. So the hooks run in the thread that is about to raise, once in the life of a group. They also run before this
rank's own ``abort()``. A second thread that meets the failure waits for the hooks to finish, because its exception may
end the process. The other ranks do not wait for the hooks: within a host, the core publishes the failure in shared
memory before Python learns of it.

A failure that the core reports names the group but does not refer to its Python objects. So the hooks of a group are
looked up by its name, as `core_failures` looks up the members of groups on several hosts.
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
"""Kinds of failure for which no hooks run: the group itself continues, or this rank has left it."""

_of_group: weakref.WeakValueDictionary[tuple[int, str], AbortHooks] = weakref.WeakValueDictionary()


class AbortHooks:
    """The abort hooks of one group on this rank, and the failure for which they have run.

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
        """Register a function to be called before a failure of the group is raised; replaces a hook with the same id.

        Raises:
            TypeError: `hook` can't be called.
        """
        if not callable(hook):
            raise TypeError(f"register_abort_hook() takes a function without arguments, got {hook!r}")
        self._hooks[hook_id] = hook

    def unregister(self, hook_id: int) -> None:
        """Remove a hook. As in NCCL, an unknown id is ignored."""
        self._hooks.pop(hook_id, None)

    def meet(self, failure: Failure) -> None:
        """Note the failure of the group if it is the first, and run all hooks once, in the order of their ids.

        Raises nothing, because native code waits for the failure's own error. A hook that examines the failed group may
        itself fail; its error is printed.
        """
        self.failure = self.failure or failure
        if not self._lock.acquire(timeout=HOOKS_S):  # a hook that hangs in another thread must not hold back the error
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
        """Expect another failure, because the group has new ranks; the hooks stay."""
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
