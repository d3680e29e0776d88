"""The classes of a verified group, for torch and programs: the usual ones, with each operation verified by `proof`.

A group that is not verified has the usual classes, so verification costs it nothing, not one instruction.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ReduceOp, Store

from phalanx.backend.calls.collectives import UNSET, Blocking
from phalanx.backend.calls.ops import Operations
from phalanx.backend.communicator import Communicator
from phalanx.backend.deadlines import SETTLE_S
from phalanx.backend.hosts.bridges import LOOPBACK
from phalanx.backend.torch.adapters import PhalanxGroup, keep_from_compiler
from phalanx.backend.types import RedOpType
from phalanx.backend.verify.oracle import Oracle
from phalanx.backend.verify.proof import Proof
from phalanx.backend.verify.reports import tally
from phalanx.host.network import outside_address

_AVG = ReduceOp(RedOpType.AVG)


class VerifiedOperations(Operations):
    """Operations of a group that is verified.

    Attributes:
        proof: The verification.
    """

    proof: Proof
    _has_left = False

    def verify(self, store: Store, every: int, silence_s: float) -> None:
        """Connect the ranks through Gloo as well, to compare results with it. Every rank must call this.

        Args:
            store: Store used only for this.
            every: Number k; every k-th call is verified.
            silence_s: Seconds without an answer after which a connection counts as lost.
        """
        # Ranks that share memory also share a network namespace: a rank in a different one counts as another host.
        address = getattr(self._core, "address", LOOPBACK) or outside_address()
        oracle = Oracle(self._core, store, self.ranks, address, lambda: self.timeout, silence_s)
        self.proof = Proof(self, oracle, every, self.name)
        tally.begin(self.proof.me)
        self._pid = os.getpid()

    def end_threads(self) -> None:
        if not self.proof.drain(SETTLE_S):  # a thread that returned from Gloo once Python is gone would crash
            self._leave(may_wait=False)

    def shutdown(self, why: str = "") -> None:
        self._leave(may_wait=not why)
        super().shutdown(why)

    def _leave(self, *, may_wait: bool) -> None:
        if self._has_left:
            return
        self._has_left = True
        if os.getpid() == self._pid:
            self.proof.close(may_wait=may_wait)
        else:  # a forked child lacks Gloo's threads, and destroying Gloo would wait for them
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.proof))


def _send(operations: Any, tensors: Any, dst: int, tag: int) -> Any:
    return operations.proof.messages.send(tensors, dst, tag)


def _recv(operations: Any, tensors: Any, src: int, tag: int) -> Any:
    return operations.proof.messages.recv(Operations.recv, tensors, src, tag)


def _recv_anysource(operations: Any, tensors: Any, tag: int) -> Any:
    return operations.proof.messages.recv(Operations.recv_anysource, tensors, -1, tag)


_OF_MESSAGES: dict[Any, Callable[..., Any]] = {
    Operations.send: _send,
    Operations.recv: _recv,
    Operations.recv_anysource: _recv_anysource,
}


@functools.cache
def checked(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs a method of `Operations` and verifies the result."""
    if run in _OF_MESSAGES:
        return _OF_MESSAGES[run]

    def call(operations: Any, *args: Any) -> Any:
        return operations.proof.collective(run, args)

    return call


@functools.cache
def verified(cls: type) -> Any:
    """Return a class of a group or backend whose operations are verified."""
    methods = {name: method.with_run(checked) for name, method in _routes(cls).items()}
    made = type(f"Verified{cls.__name__}", (cls,), methods)
    keep_from_compiler(made)
    return made


def _routes(cls: type) -> dict[str, Any]:
    """Return the methods by which torch reaches an operation."""
    members = {name: member for base in reversed(cls.__mro__) for name, member in vars(base).items()}
    return {name: member for name, member in members.items() if hasattr(member, "with_run")}


class VerifiedGroup(verified(PhalanxGroup)):  # type: ignore[misc]
    """The process group that Python callers see, verified."""

    def run(self, method: str, *args: Any) -> Any:
        """Run the method of `Operations` that has this name, and verify it."""
        return checked(getattr(Operations, method))(self._operations, *args)

    def average_coalesced(
        self, tensors: list[torch.Tensor], marks: torch.Tensor, *, with_squares: bool = False
    ) -> float:
        def average_coalesced(operations: Operations, tensors: Any, marks: torch.Tensor, _: Blocking) -> float:
            return operations.average_coalesced(tensors, marks, with_squares=with_squares)

        with torch.DisableTorchFunctionSubclass():
            options = Blocking(UNSET, reduce_op=_AVG)
            squares: float = self._operations.proof.collective(average_coalesced, (tensors, marks, options))
            return squares


class VerifiedCommunicator(Communicator):
    """Direct access to the operations of a verified group."""

    def _run_plain(self, *_: Any) -> bool:
        return False

    def _run(self, method: Callable[..., Any], *args: Any) -> Any:
        return super()._run(checked(method), *args)

    def _peer(self, op: str, name: str, number: Any) -> int:
        peer = self._ranks.get(number)
        if peer is None or peer == self.rank:
            raise self._no_peer(op, name, number)
        return peer

    def barrier(self) -> None:
        self._run(Operations.barrier, Blocking())

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> None:
        self._run(Operations.send, [tensor], self._peer("send", "dst", dst), tag).wait()

    def recv(self, tensor: torch.Tensor, src: int | None = None, tag: int = 0) -> int:
        if src is None:
            work = self._run(Operations.recv_anysource, [tensor], tag)
        else:
            work = self._run(Operations.recv, [tensor], self._peer("recv", "src", src), tag)
        work.wait()
        return self._operations.ranks.global_ranks[work.source_rank()]


VerifiedGroup.communicator_type = VerifiedCommunicator
