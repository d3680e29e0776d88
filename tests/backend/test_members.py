"""Every member that torch's groups and backends have: ours does it or refuses it, and none recurses or hangs.

A member that a newer torch adds fails here by its name, until somebody has decided what ours does.
"""

from __future__ import annotations

import inspect
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from phalanx import _torch
from tests.backend.test_observers import needs_python_backends

pytestmark = pytest.mark.kept_ranks

CPU = torch.device("cpu")
SOON = timedelta(seconds=20)


def own(rank):
    return torch.full((2,), rank + 1.0)


def four(rank=0):
    return torch.arange(4.0) + rank


def store():
    return dist.HashStore()


# What each member is called with, by its name; a member that is not here takes nothing, or is a property.
ARGUMENTS = {
    "_add_ephemeral_timeout": lambda rank: (timedelta(0),),
    "_allgather_base": lambda rank: (four(), own(rank)),
    "_backend_id": lambda rank: (c10d.Backend.backend_type_map[dist.get_backend()],),
    "_get_backend": lambda rank: (CPU,),
    "_reduce_scatter_base": lambda rank: (own(0), four(rank)),
    "_register_backend": lambda rank: (
        torch.device("meta"),
        ProcessGroup.BackendType.CUSTOM,
        dist.group.WORLD._get_backend(CPU),
    ),
    "_register_on_completion_hook": lambda rank: (print,),
    "_set_default_backend": lambda rank: (ProcessGroup.BackendType.CUSTOM,),
    "_set_group_desc": lambda rank: ("described",),
    "_set_group_name": lambda rank: ("named",),
    "_set_group_uid": lambda rank: ("named",),
    "all_gather_single": lambda rank: (four(), own(rank)),
    "all_gather_single_coalesced": lambda rank: ([four()], [own(rank)]),
    "all_to_all_single": lambda rank: (own(0), own(rank), [], []),
    "allgather": lambda rank: ([[own(0), own(0)]], [own(rank)]),
    "allgather_coalesced": lambda rank: ([[own(0)], [own(0)]], [own(rank)]),
    "allgather_into_tensor_coalesced": lambda rank: ([four()], [own(rank)]),
    "allreduce": lambda rank: ([own(rank)],),
    "allreduce_coalesced": lambda rank: ([own(rank)],),
    "allreduce_sparse": lambda rank: ([own(rank).to_sparse()],),
    "alltoall": lambda rank: ([own(0), own(0)], [own(rank), own(rank)]),
    "alltoall_base": lambda rank: (own(0), own(rank), [], []),
    "broadcast": lambda rank: ([own(rank)],),
    "eager_connect_single_device": lambda rank: (CPU,),
    "gather": lambda rank: ([[own(0), own(0)]] if rank == 0 else [], [own(rank)]),
    "gather_into_tensor": lambda rank: (four(), own(rank)),
    "gather_single": lambda rank: (four(), own(rank)),
    "get_backend": lambda rank: (CPU,),
    "merge_remote_group": lambda rank: (store(), 2),
    "reconfigure": lambda rank: (c10d.ReconfigureOptions(),),
    "recv": lambda rank: ([own(0)], 1 - rank, 0),
    "recv_anysource": lambda rank: ([own(0)], 0),
    "reduce": lambda rank: ([own(rank)],),
    "reduce_scatter": lambda rank: ([own(0)], [[own(rank), own(rank)]]),
    "reduce_scatter_single": lambda rank: (own(0), four(rank)),
    "reduce_scatter_single_coalesced": lambda rank: ([own(0)], [four(rank)]),
    "reduce_scatter_tensor_coalesced": lambda rank: ([own(0)], [four(rank)]),
    "register_abort_hook": lambda rank: (1, print),
    "register_post_hook": lambda rank: (1, id),
    "register_pre_hook": lambda rank: (1, id),
    "scatter": lambda rank: ([own(0)], [[own(1), own(2)]] if rank == 0 else []),
    "send": lambda rank: ([own(rank)], 1 - rank, 0),
    "setUsePgForSymmMemRendezvous": lambda rank: (False,),
    "set_timeout": lambda rank: (SOON,),
    "shrink": lambda rank: ([1],),
    "split_group": lambda rank: ([0, 1],),
    "supports_tensor_alloc": lambda rank: (CPU,),
    "unbox": lambda rank: (dist.group.WORLD.boxed(),),
    "unregister_abort_hook": lambda rank: (1,),
    "unregister_post_hook": lambda rank: (1,),
    "unregister_pre_hook": lambda rank: (1,),
}
PLAIN = {  # what takes no arguments, or needs none
    *("_device_types", "_enable_collectives_timing", "_get_backend_name", "_get_sequence_number_for_group"),
    *("_has_hooks", "_id", "_set_sequence_number_for_group", "abort", "barrier", "bound_device_id", "boxed"),
    *("get_error", "get_group_store", "group_desc", "group_name", "monitored_barrier", "name", "options", "rank"),
    *("shutdown", "size", "use_pg_for_symm_mem_rendezvous", "_start_coalescing", "_end_coalescing"),
}
OF_CLASS = {  # where a group's member takes something else than a backend's
    ("Backend", "merge"): lambda rank: (store(), _torch.C10dBackend.Options("x", SOON), rank, 2),
    ("Backend", "split"): lambda rank: (store(), [0, 1], _torch.C10dBackend.Options("x", SOON)),
    ("ProcessGroup", "_end_coalescing"): lambda rank: (CPU,),
    ("ProcessGroup", "_start_coalescing"): lambda rank: (CPU,),
}
NAMED = {"allocate_tensor": {"dtype": torch.float32, "device": CPU}}
NOT_CALLED = {"_pybind11_conduit_v1_": "pybind11's own, which takes pointers to C++ types"}
LAST = ("_register_backend", "_set_default_backend", "shutdown", "abort")  # on a group that is made for it
REFUSED = {
    "_end_time_estimate": "time estimates are NCCL's",
    "_start_time_estimate": "time estimates are NCCL's",
    "_register_on_completion_hook": "NCCL's",
    "_wait_for_pending_works": "NCCL's",
    "allocate_tensor": "supports_tensor_alloc is false",
    "get_reconfigure_handle": "supports_reconfigure is false",
    "mem_allocator": "supports_tensor_alloc is false",
    "memory_stats": "of GPUs",
    "merge": "groups can't be merged",
    "merge_remote_group": "groups can't be merged",
    "new_window": "supports_window is false",
    "reconfigure": "supports_reconfigure is false",
    "register_abort_hook": "supports_abort_hooks is false",
    "resume": "of GPUs",
    "shrink": "supports_shrinking is false",
    "split": "torch's front end calls the group's split_group, not the backend's",
    "suspend": "of GPUs",
    "unregister_abort_hook": "supports_abort_hooks is false",
}
ANSWERS = {  # of questions: a true one leads programs to what is refused
    "_supports_time_estimate": False,
    "supports_abort_hooks": False,
    "supports_coalescing": False,
    "supports_completion_hooks": False,
    "supports_reconfigure": False,
    "supports_shrinking": False,
    "supports_splitting": True,
    "supports_tensor_alloc": False,
    "supports_time_estimate": False,
    "supports_window": False,
}


def use(kind, name, thing, rank):
    """Read or call a member; return what came of it, in words."""
    static = inspect.getattr_static(kind, name)
    try:
        value = getattr(thing, name)
        if not isinstance(static, property):
            get_args = OF_CLASS.get((kind.__name__, name)) or ARGUMENTS.get(name, lambda _: ())
            args = (4,) if name == "allocate_tensor" else get_args(rank)
            partner = None
            if name in ("recv", "recv_anysource"):
                partner = dist.group.WORLD.send([own(rank)], 1 - rank, 0)
            elif name == "send":
                partner = dist.group.WORLD.recv([own(rank)], 1 - rank, 0)
            value = value(*args, **NAMED.get(name, {}))
            for work in (value, partner):
                if isinstance(work, dist.Work):
                    work.wait(SOON)
    except Exception as error:
        word = "refused" if type(error) in (RuntimeError, NotImplementedError) else type(error).__name__
        return f"{word}: {error}"
    return value if name in ANSWERS else "done"


def members_of(kind):
    names = [name for name in dir(kind) if not name.startswith("__") and name not in NOT_CALLED]
    kept = (type, ProcessGroup.BackendType)  # classes and constants
    return [name for name in names if not isinstance(inspect.getattr_static(kind, name), kept)]


def walk(rank, world_size, backend):
    """Use every member of the backend and of the group; of the group once more while a hook sends it another way."""
    dist.init_process_group(backend, timeout=SOON)
    world, seen = dist.group.WORLD, {}
    for kind, way in ((_torch.C10dBackend, ""), (ProcessGroup, ""), (ProcessGroup, "under a hook")):
        if way:
            world.register_pre_hook(7, id)
        names = members_of(kind)
        for name in sorted(names, key=lambda name: name in LAST):
            group = dist.new_group() if name in LAST else world
            thing = group if kind is ProcessGroup else group._get_backend(CPU)
            seen[f"{kind.__name__}.{name} {way}".strip()] = use(kind, name, thing, rank)
    dist.all_reduce(tensor := own(rank))
    return seen, tensor.tolist()


def wanted(member):
    name = member.partition(".")[2].partition(" ")[0]
    if name in ANSWERS:
        return ANSWERS[name]
    return "refused" if name in REFUSED else "done"


@pytest.mark.parametrize("kind", [getattr(_torch, "C10dBackend", None), ProcessGroup], ids=["Backend", "ProcessGroup"])
@needs_python_backends
def test_each_member_is_known(kind):
    unknown = {*members_of(kind)} - PLAIN - {*ARGUMENTS} - {*REFUSED} - {*ANSWERS}
    assert not unknown, f"torch's {kind.__name__} has new members; say what ours does: {sorted(unknown)}"


NAMED_CALLS = {
    "allreduce": lambda rank: {"tensors": [own(rank)]},
    "allgather": lambda rank: {"output_tensors": [[own(0), own(0)]], "input_tensors": [own(rank)]},
    "all_gather_single": lambda rank: {"output": four(), "input": own(rank)},
    "broadcast": lambda rank: {"tensor": own(rank), "root": 1},
    "barrier": lambda rank: {"opts": c10d.BarrierOptions()},
}


def call_by_name(rank, world_size):
    outcomes = {}
    for name, arguments in NAMED_CALLS.items():
        work = getattr(dist.group.WORLD, name)(**arguments(rank))
        outcomes[name] = work.wait(SOON)
    works = [
        dist.group.WORLD.send(tensors=[own(rank)], dstRank=1 - rank, tag=0),
        dist.group.WORLD.recv(tensors=[got := own(0)], srcRank=1 - rank, tag=0),
    ]
    return outcomes, [work.wait(SOON) for work in works], got.tolist()


def test_a_groups_methods_take_their_arguments_by_name(run_ranks):
    for rank, seen in enumerate(run_ranks(call_by_name, 2)):
        assert seen == (dict.fromkeys(NAMED_CALLS, True), [True, True], [2.0 - rank] * 2)


@needs_python_backends
@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_every_member_of_torchs_classes_is_done_or_refused(run_ranks, backend):
    for seen, total in run_ranks(walk, 2, backend, init=False, env={"PHALANX_REPLACE": "gloo"}):
        wrong = [f"{member}: {got}, not {wanted(member)}" for member, got in seen.items() if not fits(member, got)]
        assert not wrong, "\n".join(wrong)
        assert total == [3.0, 3.0], "the group works on"


def fits(member, got):
    want = wanted(member)
    return got.startswith("refused: ") if want == "refused" else got == want


@needs_python_backends
def test_torchs_own_questions_have_answers(run_ranks):
    assert run_ranks(ask, 2) == [[False, False]] * 2


def ask(rank, world_size):
    return [c10d._supports_window(), c10d._supports_reconfigure()]
