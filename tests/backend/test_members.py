"""Every member that torch's groups and backends have: ours does it or refuses it, and none recurses or hangs.

A member that a newer torch adds fails here by its name, until `_members` says what ours does.
"""

from __future__ import annotations

import inspect

import pytest
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from tests.backend._members import CPU, NOT_USED, SITUATIONS, SOON, C10dBackend, Use, fits, outcome, own, rows_of, zeros

pytestmark = pytest.mark.kept_ranks

KINDS = {"Backend": C10dBackend, "ProcessGroup": ProcessGroup}
OPTIONS = {
    "in Gloo's place": {"env": {"PHALANX_REPLACE": "gloo"}},
    "two hosts": {"hosts": (1, 1)},
}


def members_of(kind):
    names = [name for name in dir(kind) if not name.startswith("__") and name not in NOT_USED]
    kept = (type, ProcessGroup.BackendType)  # classes and constants
    return [name for name in names if not isinstance(inspect.getattr_static(kind, name), kept)]


def used_in(situation):
    """Return the members to use, by class: those of the installed torch."""
    public = [name for name in rows_of("torch.distributed", situation) if hasattr(c10d, name)]
    return {**{name: members_of(kind) for name, kind in KINDS.items()}, "torch.distributed": public}


def walk(rank, world_size, situation):
    """Use every member; return the outcomes of those that do not fit their rows, and the sum at the end."""
    if situation == "DETAIL":
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    dist.init_process_group("gloo" if situation == "in Gloo's place" else "phalanx", timeout=SOON)
    world = dist.group.WORLD
    if situation == "under a hook":
        world.register_pre_hook(9, id)
    wrong, num_used = [], 0
    for kind, names in used_in(situation).items():
        rows = rows_of(kind, situation)
        for name in names:
            if name in rows:
                group = dist.new_group() if rows[name].alone else world
                thing = {"ProcessGroup": group, "torch.distributed": c10d}.get(kind) or group._get_backend(CPU)
                got = outcome(rows[name], Use(name, thing, group, rank))
                num_used += 1
                if not fits(rows[name], rank, got):
                    wrong.append(f"{kind}.{name} on rank {rank}: {got!r}, not {rows[name].want!r}")
    dist.all_reduce(tensor := own(rank))
    return wrong, num_used, tensor.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_each_member_is_known(kind):
    unknown = {*members_of(KINDS[kind])} - {*rows_of(kind, "plain")}
    assert not unknown, f"torch's {kind} has new members; say in _members.py what ours does: {sorted(unknown)}"


@pytest.mark.parametrize("situation", SITUATIONS)
def test_every_member_of_torchs_classes_is_done_or_refused(run_ranks, situation):
    for wrong, num_used, total in run_ranks(walk, 2, situation, init=False, **OPTIONS.get(situation, {})):
        assert not wrong, "\n".join(wrong)
        assert num_used == sum(map(len, used_in(situation).values()))
        assert total == [3.0, 3.0], "the group works on"


NAMED_CALLS = {
    "allreduce": lambda rank: {"tensors": [own(rank)]},
    "allgather": lambda rank: {"output_tensors": [[zeros(), zeros()]], "input_tensors": [own(rank)]},
    "all_gather_single": lambda rank: {"output": zeros().repeat(2), "input": own(rank)},
    "broadcast": lambda rank: {"tensor": own(rank), "root": 1},
    "barrier": lambda rank: {"opts": c10d.BarrierOptions()},
}

NAMED = {name: arguments for name, arguments in NAMED_CALLS.items() if hasattr(ProcessGroup, name)}


def call_by_name(rank, world_size):
    outcomes = {}
    for name, arguments in NAMED.items():
        work = getattr(dist.group.WORLD, name)(**arguments(rank))
        outcomes[name] = work.wait(SOON)
    works = [
        dist.group.WORLD.send(tensors=[own(rank)], dstRank=1 - rank, tag=0),
        dist.group.WORLD.recv(tensors=[got := zeros()], srcRank=1 - rank, tag=0),
    ]
    return outcomes, [work.wait(SOON) for work in works], got.tolist()


def test_a_groups_methods_take_their_arguments_by_name(run_ranks):
    for rank, seen in enumerate(run_ranks(call_by_name, 2)):
        assert seen == (dict.fromkeys(NAMED, True), [True, True], [2.0 - rank] * 2)
