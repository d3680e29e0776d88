"""What a group of phalanx answers to each member of torch's ``ProcessGroup`` and ``Backend``: a table.

A row says how the member is used by each of two ranks, and what comes of it: a value (of each rank, if they differ), or
a refusal, with words of its sentence. `test_members` walks over the members that the installed torch has and uses each
in every situation of `SITUATIONS`; where a situation has another answer, `ELSEWHERE` has a row of it. The book's page
`reference/python/communicate` lists the same members.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from phalanx import _torch
from phalanx._errors import ArgumentError

CPU = torch.device("cpu")
SOON = timedelta(seconds=20)
LATER = timedelta(seconds=30)
C10dBackend: Any = torch._C._distributed_c10d.Backend


def own(rank):
    """The tensor of a rank: two times its number, from 1."""
    return torch.full((2,), rank + 1.0)


def zeros():
    return torch.zeros(2)


def four(rank=0):
    return torch.arange(4.0) + rank


@dataclass
class Use:
    """A use of one member by one rank.

    Attributes:
        name: Name of the member.
        thing: Group, backend or module that has it.
        group: Group that the use is of.
        rank: Number of this rank.
    """

    name: str
    thing: Any
    group: ProcessGroup
    rank: int

    @property
    def member(self) -> Any:
        return getattr(self.thing, self.name)

    @property
    def backend(self) -> Any:
        return self.group._get_backend(CPU)

    @property
    def store(self) -> dist.Store:
        """A store for this use alone, which both ranks reach."""
        return dist.PrefixStore(f"{self.name}/of/{self.group.group_name}", c10d._get_default_store())

    def into(self, outputs: Any, *args: Any) -> Any:
        """Call an operation, wait for it, and return what it wrote."""
        work = self.member(*args)
        if work is not None:
            work.wait(SOON)
        return listed(outputs)

    def total_in(self, made: Any) -> list[float]:
        """Return the sum over the ranks of a group or backend that was made, and leave it."""
        made.allreduce([tensor := own(self.rank)]).wait(SOON)
        made.shutdown()
        return tensor.tolist()


def listed(tensors: Any) -> Any:
    if isinstance(tensors, torch.Tensor):
        return tensors.to_dense().tolist() if tensors.is_sparse else tensors.tolist()
    return [listed(tensor) for tensor in tensors]


class Each(NamedTuple):
    """An outcome that differs by rank."""

    first: Any
    second: Any


class Refused(NamedTuple):
    """A refusal, with words of its sentence."""

    words: str
    kind: type[Exception] = NotImplementedError


class Row(NamedTuple):
    """How a member is used, and what comes of it.

    Attributes:
        how: Function of a `Use`.
        want: Value that it returns on every rank; `Each`; or `Refused`.
        alone: Whether it is used on a group that is made for it, because it ends or changes the group.
    """

    how: Callable[[Use], Any]
    want: Any = None
    alone: bool = False


def call(*args: Any, **named: Any) -> Callable[[Use], Any]:
    return lambda use: use.member(*args, **named)


def ask(use: Use) -> Any:
    """Read a property."""
    return use.member


def with_partner(use: Use) -> Any:
    """Send to the other rank and receive from it, one of them by the member."""
    other, got = 1 - use.rank, zeros()
    if use.name == "send":
        works = [use.thing.recv([got], other, 0), use.member([own(use.rank)], other, 0)]
    else:
        where = (0,) if use.name == "recv_anysource" else (other, 0)
        works = [use.thing.send([own(use.rank)], other, 0), use.member([got], *where)]
    for work in works:
        work.wait(SOON)
    return got.tolist()


def coalesced(use: Use) -> Any:
    """Start two operations, and wait for both by one handle."""
    tensors = [own(use.rank), own(use.rank)]
    given = (CPU,) if isinstance(use.thing, ProcessGroup) else ()
    use.thing._start_coalescing(*given)
    for tensor in tensors:
        use.group.allreduce([tensor])
    work = use.thing._end_coalescing(*given)
    if work is not None:
        work.wait(SOON)
    return listed(tensors)


def hooked(use: Use) -> Any:
    """Register a hook, run an operation with it, and one without it."""
    seen: list[Any] = []
    kind = "pre" if "pre" in use.name else "post"
    getattr(use.thing, f"register_{kind}_hook")(7, lambda args: seen.append(kind))
    use.group.barrier().wait(SOON)
    getattr(use.thing, f"unregister_{kind}_hook")(7)
    use.group.barrier().wait(SOON)
    return seen


def abort_hooked(use: Use) -> Any:
    """Register two hooks, take one back, and abort."""
    seen: list[int] = []
    use.thing.register_abort_hook(7, lambda: seen.append(7))
    use.thing.register_abort_hook(8, lambda: seen.append(8))
    use.thing.unregister_abort_hook(8)
    use.group.barrier().wait(SOON)
    use.group.abort()
    return seen


def ended(use: Use) -> Any:
    """End the group; say what the next operation does."""
    use.group.barrier().wait(SOON)
    use.member()
    try:
        use.group.barrier()
    except RuntimeError as error:
        return type(error).__name__
    return "goes on"


def set_and_back(use: Use, other: Any) -> Any:
    """Set a property, and set it back."""
    before = use.member
    setattr(use.thing, use.name, other)
    after = use.member
    setattr(use.thing, use.name, before)
    return before, after


def waited_for(use: Use) -> Any:
    """Start an operation, and wait for all that have been started."""
    work = use.group.allreduce([own(use.rank)], _async(c10d.AllreduceOptions()))
    use.member()
    return work.is_completed()


def _async(options: Any) -> Any:
    options.asyncOp = True
    return options


def registered(use: Use) -> Any:
    use.member(torch.device("meta"), ProcessGroup.BackendType.CUSTOM, use.backend)
    return {device.type for device in use.group._device_types} - {"cuda"}


def with_options(use: Use, *args: Any) -> Any:
    """Make a backend of the two ranks out of this one, and sum over it."""
    options = C10dBackend.Options("phalanx", SOON) if hasattr(C10dBackend, "Options") else None
    if use.name == "split":
        return use.total_in(use.member(use.store, [0, 1], options))
    return use.total_in(use.member(use.store, options, use.rank, 2))


GATHERED = [[1.0, 1.0], [2.0, 2.0]]
FLAT = [1.0, 1.0, 2.0, 2.0]
SUM = [3.0, 3.0]
NONE_OF_IT = "does not support"  # torch's own words, where the members belong together and `supports_...` is False

OPERATIONS = {
    "broadcast": Row(lambda use: use.into(t := own(use.rank), [t]), [1.0, 1.0]),
    "allreduce": Row(lambda use: use.into(t := own(use.rank), [t]), SUM),
    "allreduce_coalesced": Row(lambda use: use.into(t := own(use.rank), [t]), SUM),
    "allreduce_sparse": Row(lambda use: use.into(t := own(use.rank).to_sparse(), [t]), SUM),
    "reduce": Row(lambda use: use.into(t := own(use.rank), [t])[use.rank * 2 :], Each(SUM, [])),
    "allgather": Row(lambda use: use.into(o := [zeros(), zeros()], [o], [own(use.rank)]), GATHERED),
    "allgather_coalesced": Row(
        lambda use: use.into(o := [[zeros()], [zeros()]], o, [own(use.rank)]), [[[1.0, 1.0]], [[2.0, 2.0]]]
    ),
    **{
        name: Row(lambda use: use.into(o := four(), o, own(use.rank)), FLAT)
        for name in ("all_gather_single", "_allgather_base")
    },
    **{
        name: Row(lambda use: use.into(o := four(), [o], [own(use.rank)]), FLAT)
        for name in ("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
    },
    "gather": Row(
        lambda use: use.into(o := [] if use.rank else [zeros(), zeros()], [o] if o else [], [own(use.rank)]),
        Each(GATHERED, []),
    ),
    **{
        name: Row(lambda use: use.into(o := four(), o, own(use.rank)), Each(FLAT, [0.0, 1.0, 2.0, 3.0]))
        for name in ("gather_single", "gather_into_tensor")
    },
    "scatter": Row(
        lambda use: use.into(o := zeros(), [o], [] if use.rank else [[own(1), own(2)]]), Each([2.0, 2.0], [3.0, 3.0])
    ),
    "reduce_scatter": Row(lambda use: use.into(o := zeros(), [o], [[own(use.rank), own(use.rank)]]), SUM),
    **{
        name: Row(lambda use: use.into(o := zeros(), o, four(use.rank)), Each([1.0, 3.0], [5.0, 7.0]))
        for name in ("reduce_scatter_single", "_reduce_scatter_base")
    },
    **{
        name: Row(lambda use: use.into(o := zeros(), [o], [four(use.rank)]), Each([1.0, 3.0], [5.0, 7.0]))
        for name in ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
    },
    "alltoall": Row(lambda use: use.into(o := [zeros(), zeros()], o, [own(use.rank), own(use.rank)]), GATHERED),
    **{
        name: Row(lambda use: use.into(o := zeros(), o, own(use.rank), [], []), [1.0, 2.0])
        for name in ("all_to_all_single", "alltoall_base")
    },
    "send": Row(with_partner, Each([2.0, 2.0], [1.0, 1.0])),
    "recv": Row(with_partner, Each([2.0, 2.0], [1.0, 1.0])),
    "recv_anysource": Row(with_partner, Each([2.0, 2.0], [1.0, 1.0])),
    "barrier": Row(lambda use: use.into([]), []),
    "monitored_barrier": Row(call(), None),
    "_start_coalescing": Row(coalesced, [SUM, SUM]),
    "_end_coalescing": Row(coalesced, [SUM, SUM]),
}
"""Operations, which groups and backends have alike."""

BOTH = {
    "rank": Row(call(), Each(0, 1)),
    "size": Row(call(), 2),
    "name": Row(call(), "phalanx"),
    "_get_backend_name": Row(call(), "phalanx"),
    "_get_sequence_number_for_group": Row(lambda use: use.member() >= 0, True),
    "_set_sequence_number_for_group": Row(call(), None),  # numbers begin at 0 everywhere
    "_enable_collectives_timing": Row(call(), None),  # nothing reads these times
    "set_timeout": Row(lambda use: (use.member(LATER), use.group.timeout), (None, LATER)),
    "_set_default_timeout": Row(lambda use: (use.member(LATER), use.group.timeout), (None, LATER)),
    "_add_ephemeral_timeout": Row(call(SOON), None),
    "supports_abort_hooks": Row(ask, True),
    "register_abort_hook": Row(abort_hooked, [7], alone=True),
    "unregister_abort_hook": Row(abort_hooked, [7], alone=True),
    "supports_completion_hooks": Row(ask, False),
    "_register_on_completion_hook": Row(call(print), Refused("call get_future().then() on the work")),
    "_wait_for_pending_works": Row(waited_for, True),
    "supports_reconfigure": Row(ask, True),
    "get_reconfigure_handle": Row(lambda use: use.member().partition(":")[0], "phalanx"),
    "reconfigure": Row(lambda use: use.member(c10d.ReconfigureOptions()), Refused("handle per rank", ArgumentError)),
    "supports_window": Row(ask, True),
    "new_window": Row(lambda use: use.member().get_attr(use.rank).access_type.name, "UNIFIED"),
    "abort": Row(ended, "GroupUnusable", alone=True),
    "shutdown": Row(ended, "GroupUnusable", alone=True),
}

GROUP = {
    **OPERATIONS,
    **BOTH,
    "group_name": Row(lambda use: use.member in c10d._world.pg_names.values(), True),
    "group_desc": Row(ask, "default_pg"),
    "_set_group_name": Row(lambda use: (use.member("named"), use.group.group_name), (None, "named"), alone=True),
    "_set_group_desc": Row(lambda use: (use.member("said"), use.group.group_desc), (None, "said"), alone=True),
    "get_group_store": Row(lambda use: isinstance(use.member(), dist.Store), True),
    "_device_types": Row(lambda use: {device.type for device in use.member}, {"cpu"}),
    "get_backend": Row(lambda use: use.member(CPU) is use.backend, True),
    "_get_backend": Row(lambda use: use.member(CPU) is use.backend, True),
    "_id": Row(lambda use: use.member() > 0, True),
    "_backend_id": Row(lambda use: use.member(c10d.Backend.backend_type_map[dist.get_backend()]) > 0, True),
    "_register_backend": Row(registered, {"cpu", "meta"}, alone=True),
    "_set_default_backend": Row(call(ProcessGroup.BackendType.CUSTOM), None, alone=True),
    "bound_device_id": Row(lambda use: set_and_back(use, torch.device("cpu:0")), (None, torch.device("cpu:0"))),
    "use_pg_for_symm_mem_rendezvous": Row(lambda use: set_and_back(use, True), (False, True)),
    "boxed": Row(lambda use: ProcessGroup.unbox(use.member()) is use.group, True),
    "unbox": Row(lambda use: use.member(use.group.boxed()) is use.group, True),
    "split_group": Row(lambda use: use.total_in(use.member([0, 1])), SUM),
    "merge_remote_group": Row(lambda use: use.total_in(use.member(use.store, 2)), SUM),
    "_has_hooks": Row(call(), False),
    **{
        f"{word}register_{kind}_hook": Row(hooked, [kind], alone=True)
        for kind in ("pre", "post")
        for word in ("", "un")
    },
}
"""Members of ``ProcessGroup``, on the group that ``torch.distributed`` hands out."""

BACKEND = {
    **OPERATIONS,
    **BOTH,
    "options": Row(lambda use: use.member.backend, "phalanx"),
    "_set_group_uid": Row(lambda use: (use.member("named"), use.group.group_name), (None, "named"), alone=True),
    "bound_device_id": Row(ask, None),
    "setUsePgForSymmMemRendezvous": Row(call(False), None),
    "eager_connect_single_device": Row(call(CPU), None),  # a group is connected when it has been made
    "get_error": Row(lambda use: use.member().name, "SUCCESS"),
    "supports_splitting": Row(ask, True),
    "split": Row(with_options, SUM),
    "merge": Row(with_options, SUM),
    "supports_coalescing": Row(ask, False),  # messages of a batch progress together anyway
    "supports_shrinking": Row(ask, True),
    "shrink": Row(call([]), Refused("ranks_to_exclude", ArgumentError)),
    "supports_time_estimate": Row(ask, False),
    "_supports_time_estimate": Row(ask, False),
    "_start_time_estimate": Row(call(), Refused("time.perf_counter()")),
    "_end_time_estimate": Row(call(), Refused("time.perf_counter()")),
    "supports_tensor_alloc": Row(call(CPU), True),
    "allocate_tensor": Row(lambda use: tuple(use.member(4, dtype=torch.int32, device=CPU).shape), (4,)),
    "mem_allocator": Row(ask, Refused("torch.empty()")),
    "memory_stats": Row(lambda use: 0 < use.member()["segment_bytes"] <= use.member()["segment_bytes_mapped"], True),
    "suspend": Row(call(), Refused("destroy_process_group()")),
    "resume": Row(call(), Refused("destroy_process_group()")),
}
"""Members of ``Backend``, on what ``group._get_backend(torch.device("cpu"))`` returns."""


def estimate(use: Use) -> None:
    with use.member():
        pass


def in_a_manager(use: Use) -> Any:
    with use.member(async_ops=True) as manager:
        dist.all_reduce(tensor := own(use.rank))
    manager.wait()
    return tensor.tolist()


PUBLIC = {
    "set_timeout": Row(lambda use: (use.member(LATER), use.group.timeout), (None, LATER)),
    "_set_pg_timeout": Row(lambda use: (use.member(LATER), use.group.timeout), (None, LATER)),
    "_add_ephemeral_timeout_for_all_pgs": Row(call(SOON), None),
    "split_group": Row(lambda use: use.total_in(use.member(split_ranks=[[0, 1]])), SUM),
    "shrink_group": Row(call([]), Refused("ranks_to_exclude", ValueError)),
    "_supports_reconfigure": Row(call(), True),
    "_get_reconfigure_handle": Row(lambda use: use.member().partition(":")[0], "phalanx"),
    "_reconfigure": Row(call(1, ["a", "b"]), Refused("is not a handle of phalanx", ArgumentError)),
    "_supports_window": Row(call(), True),
    "_new_window": Row(lambda use: use.member().get_attr(use.rank).access_type.name, "UNIFIED"),
    "_time_estimator": Row(estimate, Refused("not supported")),
    "_coalescing_manager": Row(in_a_manager, SUM),
    "monitored_barrier": Row(call(), None),
}
"""Functions of ``torch.distributed.distributed_c10d`` that use these members, where the installed torch has them."""

SITUATIONS = ("plain", "in Gloo's place", "two hosts", "DETAIL", *["under a hook"] * (_torch.version() >= (2, 14)))

ELSEWHERE: dict[str, dict[tuple[str, str], Row]] = {
    "in Gloo's place": {
        ("ProcessGroup", "name"): Row(call(), "gloo"),
        ("ProcessGroup", "_get_backend_name"): Row(call(), "gloo"),
        ("Backend", "name"): Row(call(), "gloo"),
        ("ProcessGroup", "_device_types"): Row(lambda use: {device.type for device in use.member}, {"cpu", "cuda"}),
        ("Backend", "options"): Row(lambda use: type(use.member).__qualname__, "ProcessGroupGloo._Options"),
    },
    "DETAIL": {
        ("Backend", "supports_abort_hooks"): Row(ask, False),
        ("Backend", "register_abort_hook"): Row(call(1, print), Refused(NONE_OF_IT, RuntimeError)),
        ("Backend", "unregister_abort_hook"): Row(call(1), Refused(NONE_OF_IT, RuntimeError)),
        ("Backend", "supports_window"): Row(ask, False),
        ("Backend", "new_window"): Row(call(), Refused(NONE_OF_IT, RuntimeError)),
        ("Backend", "supports_tensor_alloc"): Row(call(CPU), False),
        ("Backend", "allocate_tensor"): Row(BACKEND["allocate_tensor"].how, Refused(NONE_OF_IT, RuntimeError)),
        ("Backend", "gather_single"): Row(BACKEND["gather_single"].how, Refused(NONE_OF_IT, RuntimeError)),
        ("Backend", "gather_into_tensor"): Row(BACKEND["gather_into_tensor"].how, Refused(NONE_OF_IT, RuntimeError)),
        ("Backend", "supports_reconfigure"): Row(ask, False),
        ("Backend", "get_reconfigure_handle"): Row(call(), Refused(NONE_OF_IT, RuntimeError)),
        ("Backend", "reconfigure"): Row(GROUP["reconfigure"].how, Refused(NONE_OF_IT, RuntimeError)),
        ("Backend", "supports_shrinking"): Row(ask, False),
        ("Backend", "shrink"): Row(call([1]), Refused("keeps its ranks")),
        ("ProcessGroup", "supports_reconfigure"): Row(ask, False),
        ("ProcessGroup", "get_reconfigure_handle"): Row(call(), Refused("keeps its ranks")),
        ("ProcessGroup", "reconfigure"): Row(GROUP["reconfigure"].how, Refused("keeps its ranks")),
        ("torch.distributed", "shrink_group"): Row(call([1]), Refused(NONE_OF_IT, TypeError)),
        ("torch.distributed", "_supports_reconfigure"): Row(call(), False),
        ("torch.distributed", "_get_reconfigure_handle"): Row(call(), Refused("keeps its ranks")),
        ("torch.distributed", "_reconfigure"): Row(call(1, ["a", "b"]), Refused("keeps its ranks")),
    },
}
"""Rows of the situations that have others. In DETAIL, torch's wrapper stands before the backend, and hands less on."""

NOT_USED = {"_pybind11_conduit_v1_": "pybind11's own, which takes pointers to C++ types"}


BEFORE_2_14 = {
    **{("Backend", name): BACKEND[name] for name in ("supports_tensor_alloc", "allocate_tensor")},  # no wrapper
    ("Backend", "_get_backend_name"): Row(call(), "gloo"),
    ("Backend", "shrink"): Row(call([1]), Refused(NONE_OF_IT, RuntimeError)),
    ("Backend", "_start_coalescing"): Row(coalesced, Refused("does not implement", RuntimeError)),
    ("Backend", "_end_coalescing"): Row(coalesced, Refused("does not implement", RuntimeError)),
    ("ProcessGroup", "_backend_id"): Row(lambda use: use.member(ProcessGroup.BackendType.GLOO) > 0, True),
}
"""Rows of a torch in which a real Gloo is the backend that C++ callers reach, and its operations are Gloo's."""

BEFORE_2_12 = {("Backend", "alltoall"): Row(BACKEND["alltoall"].how, Refused(NONE_OF_IT, RuntimeError))}
"""Rows of a torch whose Gloo has no alltoall."""

BEFORE_2_15 = {
    ("torch.distributed", "split_group"): Row(PUBLIC["split_group"].how, Refused("No device", RuntimeError)),
}
"""Rows of a torch whose front end splits groups of GPUs alone."""

WITHOUT_RECONFIGURE = {
    ("Backend", "supports_shrinking"): Row(ask, False),
    ("Backend", "shrink"): Row(call([1]), Refused("keeps its ranks")),
    ("torch.distributed", "shrink_group"): Row(call([1]), Refused(NONE_OF_IT, TypeError)),
}
"""Rows of a torch in which groups keep their ranks."""


def rows_of(kind: str, situation: str) -> dict[str, Row]:
    """Return the table of ``ProcessGroup``, ``Backend`` or ``torch.distributed`` in a situation."""
    rows = {"ProcessGroup": GROUP, "Backend": BACKEND, "torch.distributed": PUBLIC}[kind]
    others = dict(ELSEWHERE.get(situation, {}))
    if not hasattr(C10dBackend, "reconfigure"):
        others.update(WITHOUT_RECONFIGURE)
    for version, older in (((2, 15), BEFORE_2_15), ((2, 14), BEFORE_2_14), ((2, 12), BEFORE_2_12)):
        if _torch.version() < version:
            others.update(older)
    return {**rows, **{name: row for (of, name), row in others.items() if of == kind}}


def outcome(row: Row, use: Use) -> Any:
    """Use a member as its row says; return what came of it, as plain data."""
    try:
        return row.how(use)
    except Exception as error:
        return "raised", type(error).__name__, str(error)


def fits(row: Row, rank: int, got: Any) -> bool:
    """Whether what came of a use is what the row says."""
    want = row.want
    if isinstance(want, Each):
        want = want[rank]
    if isinstance(want, Refused):
        return isinstance(got, tuple) and got[:2] == ("raised", want.kind.__name__) and want.words in got[2]
    return type(got) is type(want) and got == want
