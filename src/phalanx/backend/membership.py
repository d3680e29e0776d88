"""Changes the ranks of a living group: torch's `reconfigure` replaces them, torch's `shrink` makes a smaller group.

**In place.** torch, wrappers and programs hold references to the group, its backend and its operations. So these
objects stay, and get another core: `Operations.part` ends everything that runs in the old core, on this rank and the
others, and `meet` continues with the new one. torch gets rank and size from the group (`torch/adapters.py`).

**One way to meet.** The ranks meet as for any new group (`hosts/joining.py`), in the lobby of one of them (`handles`).
A mistake in the list itself is visible to every rank, so all ranks raise before anything is touched. Other mistakes are
known to one rank only: its handle is from before an earlier reconfigure, or it has already seen the uuid. That rank
reports the mistake in the meeting, and all ranks raise it. A reconfigure that fails after it has begun leaves the group
without ranks; the next one may succeed.

**Compared with alternatives.** Gloo's `reconfigure` leaves operations of the former ranks waiting, needs the group's
store alive, and notices dead processes only at its timeout. ``phalanx.resilient`` (`session/survival.py`) gives the
lost rank's place to a new process and runs the training function again. It needs no handles and works with every
backend, so it does not use this module.
"""

from __future__ import annotations

import hashlib
import operator
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from phalanx import _torch
from phalanx._env import seconds
from phalanx._errors import ArgumentError, GroupUnusable, PhalanxError, RankFailed
from phalanx._settings import GroupOptions
from phalanx._text import enumerated
from phalanx.backend.calls.work import PhalanxWork, finished
from phalanx.backend.failures.members import Ranks
from phalanx.backend.handles import Handle, enter_lobby, is_dead, keep_lobby, own_handle, read_handles
from phalanx.backend.hosts.joining import Joined, join_group
from phalanx.backend.hosts.meeting import Meeting
from phalanx.backend.torch.adapters import PhalanxGroup, kept_groups
from phalanx.record import writer

_ABORT = 1  # torch's SHRINK_ABORT; SHRINK_DEFAULT is 0
_AGAIN = "collect the handles again and call it with another uuid"
_ENTRY = "reconfigure"


def reconfigures() -> bool:
    """Whether groups of this process can get other ranks: torch has `reconfigure` since 2.14."""
    has_it = hasattr(_torch.C10dBackend, "reconfigure")
    return has_it and c10d.get_debug_level() != c10d.DebugLevel.DETAIL  # the debug wrapper keeps its own ranks


class Membership:
    """The ranks of one group, seen from one of them.

    Args:
        group: The group, which must outlive this object.
        options: Options of the group.
        is_world: Whether the group's own ranks are the ranks of the world, as in the default group.
        life: Name of the group's present life, the same on all its ranks; empty if it has no ranks yet.
    """

    def __init__(self, group: PhalanxGroup, options: GroupOptions | None, is_world: bool, life: str) -> None:
        self._ref = weakref.ref(group)
        self._options = options
        self._is_world = is_world
        self._life = life
        self._tokens = [_token()]  # one for each life of the group, the present one last
        self._uuids: set[int] = set()
        self._pid = os.getpid()
        self._busy = threading.Lock()

    @property
    def _group(self) -> PhalanxGroup:
        group = self._ref()
        assert group is not None  # torch/adapters.py keeps every group until this rank leaves it
        return group

    def handle(self) -> str:
        """Return this rank's handle in this life of the group."""
        self._require_open("get_reconfigure_handle")
        return self._handle().text()

    def _handle(self) -> Handle:
        group = self._group
        rank = group.rank() if self._is_world else dist.get_rank()
        return own_handle(rank, group._operations.name, self._tokens[-1], self._life, group.life_store)

    # ---- other ranks -----------------------------------------------------------------------------------------------

    def reconfigure(self, options: Any) -> PhalanxWork:
        """Give the group the ranks that the handles name; return a work that is over.

        Args:
            options: torch's ``ReconfigureOptions``. Its hints are for other backends.

        Raises:
            ArgumentError: The handles or the timeout are wrong; nothing has changed.
            RankFailed: The process of a handle has ended.
            CollectiveTimeout: A rank did not arrive in time.
            PhalanxError: A rank refuses because of an old handle, a uuid that was used before, or a different list.
            GroupUnusable: Another thread is reconfiguring the group, or has destroyed it.
        """
        where = self._require_open("reconfigure")
        if not self._busy.acquire(blocking=False):
            raise GroupUnusable(
                f"{where}: another thread of this process is giving the group other ranks; call it in one of them",
                op=_ENTRY,
            )
        try:
            return self._reconfigure(options, where)
        finally:
            self._busy.release()

    def _reconfigure(self, options: Any, where: str) -> PhalanxWork:
        handles = read_handles(options.handles, where)
        given = options.timeout
        timeout_s = seconds("timeout", self._group._operations.timeout if given is None else given)
        me, refuses = self._find_me(handles, where)
        self._require_one_world(handles, where)
        uuid = operator.index(options.uuid)
        if uuid in self._uuids:
            refuses = f"uuid {uuid} was already used in this group; every reconfigure() needs another one"
        self._require_living(handles, where)
        self._uuids.add(uuid)
        if not refuses:
            self._group._operations.part()
        self._meet(handles, me, uuid, timeout_s, refuses)
        return finished([])

    def _require_open(self, op: str) -> str:
        """Return the start of error messages; raise if this process has left the group or was forked from a member."""
        operations = self._group._operations
        where = operations.arguments(op).where()
        if os.getpid() != self._pid:
            raise GroupUnusable(f"{where}: this process was forked from a rank of the group and is not one", op=op)
        if operations.is_left:
            raise GroupUnusable(f"{where}: the group was destroyed on this rank; make a new one", op=op)
        return where

    def _find_me(self, handles: Sequence[Handle], where: str) -> tuple[int, str]:
        """Return the index of this rank's handle, and the reason to refuse if the handle is old (empty otherwise)."""
        tokens = [handle.token for handle in handles]
        for token in reversed(self._tokens):
            if token in tokens:
                number = tokens.index(token)
                is_old = token != self._tokens[-1]
                return number, f"the handle of {handles[number].name} is from before it got other ranks" * is_old
        raise ArgumentError(
            f"{where}: this rank's own handle is not among the {len(handles)} that were passed; a rank that is "
            "left out must not call this"
        )

    def _require_one_world(self, handles: Sequence[Handle], where: str) -> None:
        """Raise if two handles have the same rank in the world, as handles of two worlds may.

        A group whose own ranks are those of the world numbers its ranks anew, so it accepts such handles.
        """
        first: dict[int, Handle] = {}
        for handle in () if self._is_world else handles:
            if first.setdefault(handle.rank, handle) is not handle:
                raise ArgumentError(
                    f"{where}: two handles are of rank {handle.rank} of the world, {first[handle.rank].name} and "
                    f"{handle.name}; let the world get the new ranks first, or use a group that is the world"
                )

    def _require_living(self, handles: Sequence[Handle], where: str) -> None:
        """Raise if the process of a handle has ended and all ranks are on one host, so that all of them see this.

        If the ranks are on several hosts, do nothing: the meeting reports the death.
        """
        if len({handle.kernel for handle in handles}) > 1:
            return
        if dead := [handle for handle in handles if is_dead(handle)]:
            ranks = [handles.index(handle) for handle in dead]
            raise RankFailed(
                f"{where}: {', '.join(handle.name for handle in dead)} has ended; leave out the handle of "
                f"{enumerated('rank', ranks)} and call it again",
                op="reconfigure",
                ranks=tuple(ranks),
                pid=dead[0].process[0],
                entry=_ENTRY,
            )

    def _meet(self, handles: Sequence[Handle], me: int, uuid: int, timeout_s: float, refuses: str) -> None:
        group, operations = self._group, self._group._operations
        size = len(handles)
        global_ranks = list(range(size)) if self._is_world else [handle.rank for handle in handles]
        deadline = time.monotonic() + timeout_s
        server = min(handles, key=lambda handle: handle.place)  # the same for any order of the list
        lobby = self._enter(server, handles, me, timeout_s)

        def prepare(meeting: Meeting) -> None:
            meeting.serves = handles[me] == server
            if refuses:
                raise meeting.refusal(f"{refuses}: {_AGAIN}", [global_ranks[me]], entry=_ENTRY)
            for number, handle in enumerate(handles):
                if handle.kernel == handles[me].kernel:
                    meeting.watch(number, handle.process)
            self._agree(meeting, handles, uuid)

        joined = join_group(
            dist.PrefixStore(f"reconfigure/{server.token}/{uuid}", lobby),
            me,
            size,
            operations.name,
            global_ranks,
            max(deadline - time.monotonic(), 0.001),
            self._options,
            processes={},
            op="reconfigure",
            prepare=prepare,
        )
        keep_lobby(server, lobby)
        if operations.is_left:  # another thread has destroyed the group meanwhile
            joined.core.leave("the group was destroyed on this rank")
            self._require_open("reconfigure")
        operations.meet(joined.core, joined.segment, Ranks(me, size, global_ranks))
        is_world = group is dist.group.WORLD
        if is_world:
            _renumber({handle.rank: number for number, handle in enumerate(handles) if handle.life == self._life})
            _begin_anew(group, joined)
        for one in kept_groups() if is_world else (group,):  # handles hold ranks of the world, which change
            if (membership := getattr(one.backend, "membership", None)) is not None:
                membership._tokens.append(_token())
        self._life = joined.life
        writer.begin(global_ranks[me], size)
        group.moved(joined.store, joined.processes, global_ranks)
        _torch.world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(global_ranks)}

    def _enter(self, server: Handle, handles: Sequence[Handle], me: int, timeout_s: float) -> Any:
        try:
            return enter_lobby(server, handles, me, timeout_s)
        except (OSError, dist.DistError) as error:
            raise PhalanxError(
                f"rank {me}: reconfigure: the ranks meet in the process of {server.name}, the lowest former rank, and "
                f"it does not answer at {server.address}, port {server.port} ({error}). If it has ended, {_AGAIN}; "
                "otherwise let the hosts reach it (GLOO_SOCKET_IFNAME names the interface).",
                op="reconfigure",
                ranks=(handles.index(server),),
                entry=_ENTRY,
            ) from error

    def _agree(self, meeting: Meeting, handles: Sequence[Handle], uuid: int) -> None:
        """Raise if another rank was given other handles."""
        said = hashlib.sha256("\n".join(handle.token for handle in handles).encode()).hexdigest()
        key = "handles"
        first = meeting.ask(lambda store: store.compare_set(key, "", said))
        if first.decode() != said:
            raise meeting.refusal(
                f"the ranks were given different handles, or the same in another order, for uuid {uuid}. Pass the same "
                f"list on every rank: {_AGAIN}",
                entry=_ENTRY,
            )

    # ---- fewer ranks -----------------------------------------------------------------------------------------------

    def shrink(self, ranks_to_exclude: Sequence[int], shrink_flags: int = 0, options: Any = None) -> Any:
        """Return the backend of a new group without the excluded ranks; every rank that stays must call this.

        Args:
            ranks_to_exclude: Ranks of this group that leave.
            shrink_flags: 1 first aborts the running operations of this group, on all ranks; 0 does not.
            options: Options of the new group; None: the options of this group.

        Raises:
            ArgumentError: The ranks or the flags are wrong, or this rank is to be excluded.
            PhalanxError: The ranks can't meet, perhaps because the rank that served this group's store has ended.
        """
        where = self._require_open("shrink")
        operations, group = self._group._operations, self._group
        size, me = operations.ranks.size, operations.ranks.rank
        excluded = {operator.index(rank) for rank in ranks_to_exclude}
        if not excluded or len(excluded) != len(ranks_to_exclude) or not excluded < set(range(size)):
            raise ArgumentError(
                f"{where}: ranks_to_exclude must be some, but not all, of the ranks from 0 to {size - 1}, each once, "
                f"got {list(ranks_to_exclude)}"
            )
        if me in excluded:
            raise ArgumentError(f"{where}: this rank is to be excluded, so it must not call this; let it end")
        if shrink_flags not in (0, _ABORT):
            raise ArgumentError(f"{where}: shrink_flags must be 0 or {_ABORT} (SHRINK_ABORT), got {shrink_flags!r}")
        if shrink_flags == _ABORT:
            operations.abort()
        stay = [rank for rank in range(size) if rank not in excluded]
        world = operations.ranks.global_ranks
        made = group.maker.build(
            c10d.PrefixStore(f"shrink/{'-'.join(map(str, stay))}", group.life_store),
            stay.index(me),
            len(stay),
            operations.name,
            list(range(len(stay))) if self._is_world else [world[rank] for rank in stay],
            _timeout(options) or operations.timeout,
            options if isinstance(options, GroupOptions) else self._options,
            op="shrink",
            processes={},
            numbers_itself=self._is_world,
        )
        made.backend.brings = made
        return made.backend


def _renumber(stayed: Mapping[int, int]) -> None:
    """Give the ranks of all groups in torch their new numbers in the world; `stayed` maps former to new numbers."""
    for group, ranks in _torch.world.pg_group_ranks.items():
        now = {stayed[rank]: number for rank, number in ranks.items() if rank in stayed}
        _torch.world.pg_group_ranks[group] = now


def _begin_anew(world: Any, joined: Joined) -> None:
    """Let torch make later groups in a store of the world's new ranks, and number groups alike on every rank."""
    _torch.world.pg_map[world] = _torch.world.pg_map[world][0], joined.store
    _torch.world.group_count = max(_torch.world.group_count, joined.num_groups)


def _timeout(options: Any) -> timedelta | None:
    return _torch.attribute_of(options, "_timeout") if isinstance(options, _torch.C10dBackend.Options) else None


def _token() -> str:
    return f"rank-{os.urandom(8).hex()}"
