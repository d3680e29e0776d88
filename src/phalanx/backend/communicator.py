"""Direct access to a group's operations, without torch's front end, dispatcher and works.

Each method calls a fast function of the core (`run_plain`, `send_now`, `recv_now`), and the usual operation if that
function declines, so checks, errors and order are those of the group. A communicator skips torch's part of a call: the
front end (2 us for an all_reduce, 5 us for a gather), options, works, hooks, dispatch modes and the Flight Recorder.
``python -m bench.calls`` measures this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp

from phalanx._torch import is_profiling
from phalanx.backend.calls.arguments import codes_of
from phalanx.backend.calls.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    REDUCE_SCATTER,
    Blocking,
)
from phalanx.backend.calls.ops import Operations
from phalanx.backend.torch.adapters import PhalanxGroup
from phalanx.backend.torch.dispatch import direct
from phalanx.backend.types import REDUCE_NAMES, SUM_CODES

Tensor = torch.Tensor
_SUM = ReduceOp.SUM
_OTHER_NAMES = {"mean": "AVG", "average": "AVG", "prod": "PRODUCT", "minimum": "MIN", "maximum": "MAX"}
_GROUPS_OWN_S = 0.0  # the value that stands for the group's own timeout
_NO_ROOT = _ANY_SOURCE = -1


class Communicator:
    """Blocking operations of one group, at a fraction of the cost of a small ``torch.distributed`` call.

    The operations, their checks and their errors are the same as through ``torch.distributed``. Calls of both kinds may
    be mixed as long as every rank of the group makes the same calls in the same order. Hooks, the Flight Recorder and
    dispatch modes do not see the calls of a communicator; a profiler does.

    Methods take and return ranks of the world, as in ``torch.distributed``. :func:`communicator` returns this object.

    Attributes:
        rank: Number of this rank in the group.
        size: Number of ranks in the group.

    Example:
        >>> comm = phalanx.communicator()
        >>> tensor = torch.ones(3)
        >>> comm.all_reduce(tensor, dist.ReduceOp.MAX)
        >>> comm.broadcast(tensor, src=0)
        >>> everything = torch.empty(comm.size, 3)
        >>> comm.all_gather(everything, tensor)
        >>> comm.reduce_scatter(tensor, everything)
        >>> comm.all_to_all(everything, everything.clone())
        >>> comm.barrier()
        >>> def pass_on(rank):
        ...     with phalanx.init():
        ...         comm, tensor = phalanx.communicator(), torch.full((2,), float(rank))
        ...         if rank == 0:
        ...             comm.send(tensor, dst=1)
        ...         else:
        ...             comm.recv(tensor, src=0)
        ...         return tensor.tolist()
        >>> phalanx.spawn(pass_on, nprocs=2)
        [[0.0, 0.0], [0.0, 0.0]]
    """

    def __init__(self, group: PhalanxGroup) -> None:
        self._operations = group._operations
        self._numbered: tuple[object, dict[int, int]] = (None, {})

    @property
    def rank(self) -> int:
        return self._operations.ranks.rank

    @property
    def size(self) -> int:
        return self._operations.ranks.size

    @property
    def _ranks(self) -> dict[int, int]:
        """Map from rank in the world to rank in the group; `reconfigure` changes both numbers."""
        ranks = self._operations.ranks
        if self._numbered[0] is not ranks:
            self._numbered = ranks, {number: rank for rank, number in enumerate(ranks.global_ranks)}
        return self._numbered[1]

    def all_reduce(self, tensor: Tensor, op: Any = _SUM) -> None:
        """Reduce a tensor over all ranks, in place on every rank."""
        kernel, code = SUM_CODES if op is _SUM else codes_of(self._reduce_op("all_reduce", op))
        if not self._run_plain(ALL_REDUCE, tensor, tensor, _NO_ROOT, kernel, code):
            self._run(Operations.allreduce, [tensor], Blocking(reduce_op=self._reduce_op("all_reduce", op)))

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Copy the tensor of `src` to every rank, in place."""
        root = self._ranks.get(src)
        if root is None:
            raise self._no_peer("broadcast", "src", src)
        if not self._run_plain(BROADCAST, tensor, tensor, root):
            self._run(Operations.broadcast, [tensor], Blocking(root=root))

    def all_gather(self, output: Tensor | Sequence[Tensor], input: Tensor) -> None:
        """Gather the inputs of all ranks on every rank, in rank order.

        `output` is one tensor for all inputs, or a list with a tensor for each rank.
        """
        if self._run_plain(ALL_GATHER, input, output):
            return
        if isinstance(output, Tensor):
            self._run(Operations.all_gather_single, output, input, Blocking())
        else:
            self._run(Operations.allgather, [list(output)], [input], Blocking())

    def reduce_scatter(self, output: Tensor, input: Tensor | Sequence[Tensor], op: Any = _SUM) -> None:
        """Reduce the inputs of all ranks and give each rank its block.

        `input` is a tensor that holds one block per rank, or a list of these blocks.
        """
        kernel, code = SUM_CODES if op is _SUM else codes_of(self._reduce_op("reduce_scatter", op))
        if self._run_plain(REDUCE_SCATTER, input, output, _NO_ROOT, kernel, code):
            return
        options = Blocking(reduce_op=self._reduce_op("reduce_scatter", op))
        if isinstance(input, Tensor):
            self._run(Operations.reduce_scatter_single, output, input, options)
        else:
            self._run(Operations.reduce_scatter, [output], [list(input)], options)

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
    ) -> None:
        """Send one block of `input` to each rank, and receive one from each.

        The split sizes are the numbers of rows of dimension 0 for each rank; None: divide evenly.
        """
        is_even = output_split_sizes is None and input_split_sizes is None
        if is_even and self._run_plain(ALL_TO_ALL, input, output):
            return
        sizes = list(output_split_sizes or ()), list(input_split_sizes or ())
        self._run(Operations.all_to_all_single, output, input, *sizes, Blocking())

    def barrier(self) -> None:
        """Return once every rank has called this."""
        if self._run_plain(BARRIER, (), ()):
            self._operations.num_barriers += 1
        else:
            self._operations.barrier(Blocking())

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Send a tensor to `dst`, which must receive it with the same tag."""
        peer = self._ranks.get(dst)
        if peer is None or peer == self.rank:
            raise self._no_peer("send", "dst", dst)
        if is_profiling() or self._operations._core.send_now(tensor, peer, tag) is None:
            self._run(Operations.send, [tensor], peer, tag).wait()
        else:
            self._operations.num_messages += 1

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> int:
        """Receive into a tensor from `src`, or from any rank if `src` is None; return the sender's rank."""
        peer = _ANY_SOURCE if src is None else self._ranks.get(src)
        if peer is None or peer == self.rank:
            raise self._no_peer("recv", "src", src)
        source = None if is_profiling() else self._operations._core.recv_now(tensor, peer, tag)
        if source is None:
            method, given = (Operations.recv_anysource, ()) if src is None else (Operations.recv, (peer,))
            work = self._run(method, [tensor], *given, tag)
            work.wait()
            source = work.source_rank()
        else:
            self._operations.num_messages += 1
        return self._operations.ranks.global_ranks[source]

    def _run_plain(
        self, kind: Any, ins: object, outs: object, root: int = _NO_ROOT, kernel: int = 0, code: int = -1
    ) -> bool:
        """Run a collective unless the core finds something unusual in it; return whether it ran."""
        if is_profiling():
            return False
        return self._operations._core.run_plain(kind, ins, outs, root, kernel, code, _GROUPS_OWN_S)

    def _run(self, method: Callable[..., Any], *args: Any) -> Any:
        """Run an operation with all checks; their errors explain mistakes."""
        return direct(method, self._operations, args)

    def _reduce_op(self, name: str, op: Any) -> ReduceOp:
        """Return the reduce operation that was passed to the operation `name`.

        Raises:
            TypeError: `op` is something else, such as a string.
        """
        if type(op) is ReduceOp.RedOpType:
            return ReduceOp(op)
        if isinstance(op, ReduceOp):
            return op
        name_given = _OTHER_NAMES.get(str(op).lower(), str(op).upper())
        meant = name_given if name_given in REDUCE_NAMES else "SUM"
        raise TypeError(
            f"{self._operations.arguments(name).where()}: op must be a reduce operation of torch, got {op!r} "
            f"({type(op).__name__}); pass dist.ReduceOp.{meant}"
        )

    def _no_peer(self, op: str, name: str, number: Any) -> ValueError:
        """Return the error for a `number` that is not the rank of another member of the group."""
        where = self._operations.arguments(op).where()
        if number in self._ranks and op in ("send", "recv"):
            return ValueError(f"{where}: {name} must be another rank, got {number}; copy the tensor instead")
        members = ", ".join(map(str, self._ranks))
        return ValueError(f"{where}: {name} must be a rank of the group ({members}), got {number}")


def communicator(group: ProcessGroup | None = None) -> Communicator:
    """Return direct access to the operations of a group of the phalanx backend.

    Args:
        group: Group that this rank is a member of; None: the default group.

    Raises:
        ValueError: This rank is not a member of the group, or the group has another backend.

    Example:
        >>> phalanx.communicator().all_reduce(torch.ones(3))
    """
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise ValueError('communicator() needs a group; call init_process_group("phalanx") first')
    if found is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("communicator() needs a group that this rank is a member of; call it on the members alone")
    if not isinstance(found, PhalanxGroup):
        raise ValueError(
            f"communicator() needs a group of the phalanx backend, got one of {dist.get_backend(found)}; make one with "
            'new_group(backend="phalanx")'
        )
    return (found.communicator_type or Communicator)(found)
