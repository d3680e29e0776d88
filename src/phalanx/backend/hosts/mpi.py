"""MPI as the engine between hosts, through mpi4py and whichever MPI started the ranks."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch

from phalanx._errors import PhalanxError
from phalanx.backend.deadlines import END_S, MPI_POLL_S
from phalanx.backend.hosts.links import Link
from phalanx.wire.waiting import wait_until

_PIECE_BYTES = 1 << 30  # larger messages are cut, because counts are C ints before MPI 4
_EXCHANGE = 0  # the tag of exchanges; messages have other tags
_EAGER_POLLS = 200
_lock = threading.RLock()  # one thread at a time calls MPI, so MPI_THREAD_SERIALIZED is enough


def _mpi() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise PhalanxError(
            f"PHALANX_BRIDGE=mpi needs mpi4py, which can't be imported here ({error}): pip install mpi4py, with the "
            "MPI whose mpirun starts the ranks; of several, MPI4PY_MPIABI=openmpi or mpich names one",
            op="join",
            entry="mpi",
        ) from error
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise PhalanxError("PHALANX_BRIDGE=mpi needs an MPI with MPI_THREAD_SERIALIZED", op="join", entry="mpi")
    return MPI


def world_rank() -> int:
    """Return this process's rank in MPI's world.

    Raises:
        PhalanxError: mpi4py or a suitable MPI is missing.
    """
    return int(_mpi().COMM_WORLD.Get_rank())


def tell_all(value: Any) -> Any:
    """Broadcast the value of rank 0 in MPI's world and return it."""
    return _mpi().COMM_WORLD.bcast(value, root=0)


def library() -> str:
    """Return the name of the MPI that mpi4py has loaded."""
    name, version = _mpi().get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


class _Requests:
    """MPI requests that belong to one operation. MPI makes progress on them only when it is asked about them."""

    def __init__(self, channel: MpiChannel, receives: list[Any], sends: list[Any], keep: object) -> None:
        self._channel, self._receives, self._keep = channel, receives, keep
        self._requests = receives + sends
        self._is_over = False

    def is_completed(self) -> bool:
        if not self._is_over:
            with _lock:
                self._is_over = bool(_mpi().Request.Testall(self._requests))
        return self._is_over

    def wait(self, timeout: timedelta) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        num_polls = 0
        while not self.is_completed():
            num_polls += 1
            if self._channel.is_closed:
                self._cancel()
                raise RuntimeError("the channel was closed")
            if num_polls > _EAGER_POLLS:
                if time.monotonic() > deadline:
                    raise RuntimeError("not over yet")
                time.sleep(MPI_POLL_S)

    def _cancel(self) -> None:
        """Cancel receives, because their memory may be freed next. Sends stay, because MPI may refuse to cancel them.

        MPI does not cancel a receive that is already matched, so this waits for such a receive to end, but not for
        long, because the sender may be gone.
        """
        with _lock:
            receives, self._receives = self._receives, []
            for request in receives:
                if request != _mpi().REQUEST_NULL:
                    request.Cancel()

        def are_over() -> bool | None:
            with _lock:
                return bool(_mpi().Request.Testall(receives)) or None

        wait_until(are_over, time.monotonic() + END_S, most_s=MPI_POLL_S)


class MpiChannel:
    """Point-to-point messages over a communicator of its own.

    MPI can't close a connection to wake waiting ranks, so these ranks must ask the store for failures.

    Args:
        ranks: Ranks of the channel in MPI's world, in the channel's order; all of them must create the channel.
    """

    ends_waits = False
    links: ClassVar[dict[int, Link]] = {}

    def __init__(self, ranks: Sequence[int]) -> None:
        world = _mpi().COMM_WORLD
        self.is_closed = False
        with _lock:
            self._comm = world.Create_group(world.Get_group().Incl(list(ranks)))

    def exchange(
        self, out: torch.Tensor, source: torch.Tensor, out_bytes: Sequence[int], in_bytes: Sequence[int],
        limit: timedelta,
    ) -> _Requests:  # fmt: skip
        with _lock:
            receives, sends = (
                [
                    request
                    for peer, part in enumerate(tensor.split(list(sizes)))
                    for request in self._start(start, part, peer, _EXCHANGE)
                ]
                for start, sizes, tensor in ((self._comm.Irecv, out_bytes, out), (self._comm.Isend, in_bytes, source))
            )
        return _Requests(self, receives, sends, (out, source))

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> _Requests:
        with _lock:
            return _Requests(self, [], self._start(self._comm.Isend, tensor, peer, tag), tensor)

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> _Requests:
        with _lock:
            return _Requests(self, self._start(self._comm.Irecv, tensor, peer, tag), [], tensor)

    def _start(self, start: Any, tensor: torch.Tensor, peer: int, tag: int) -> list[Any]:
        pieces = tensor.split(_PIECE_BYTES) if tensor.numel() else ()
        return [start([piece.numpy(), piece.numel(), _mpi().BYTE], peer, tag) for piece in pieces]

    def close(self) -> None:
        """End this rank's waits; MPI frees the communicator at the end of the process."""
        self.is_closed = True

    def destroy(self) -> bool:
        return True

    def drain(self, handles: Sequence[Any]) -> None:
        for handle in handles:
            with contextlib.suppress(RuntimeError):  # the error of a canceled request
                handle.wait(timedelta(0))
