"""Open MPI as the reference, through mpi4py: ranks under mpirun make a program's calls and write the results to files.

Each rank waits for a program at a socket: if it waited inside MPI, it would spin on a core that the tested ranks need.
Data that is only moved is passed as bytes. A result whose dtype has no MPI datatype is checked by arithmetic instead.
"""

from __future__ import annotations

import os
import pickle
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch
from torch import Tensor

from phalanx import _env
from phalanx._text import joined, shortened
from phalanx.doctor.engines import mpi_environment
from phalanx.host.cpus import has_module
from phalanx.testing.fuzz.calls import Call, splits, uneven
from phalanx.testing.fuzz.messages import messages_of
from phalanx.testing.fuzz.program import Program, Step

_START_S = 120.0
_END_S = 5.0
_DATATYPES = {
    torch.float32: "FLOAT", torch.float64: "DOUBLE", torch.int8: "INT8_T", torch.int16: "INT16_T",
    torch.int32: "INT32_T", torch.int64: "INT64_T", torch.uint8: "UINT8_T", torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T", torch.uint64: "UINT64_T",
}  # fmt: skip
_OPS = {
    "SUM": "SUM", "PRODUCT": "PROD", "MIN": "MIN", "MAX": "MAX", "BAND": "BAND", "BOR": "BOR", "BXOR": "BXOR",
}  # fmt: skip


def mpirun() -> str | None:
    """Return the path of ``mpirun.openmpi``, or if that does not exist, of ``mpirun``; None if neither exists."""
    return shutil.which("mpirun.openmpi") or shutil.which("mpirun")


def why_not() -> str:
    """Return a message that names the missing programs and packages; empty if none are missing."""
    missing = [*["mpirun"] * (mpirun() is None), *["mpi4py"] * (not has_module("mpi4py"))]
    return f"no {joined(missing)} here: pip install mpi4py, and Debian's openmpi-bin" if missing else ""


class NoJudge(RuntimeError):
    """The ranks of MPI did not start; the message says why."""


class MpiRanks:
    """The MPI ranks that compute the reference results for one world size.

    Args:
        world_size: Number of ranks.

    Raises:
        NoJudge: The ranks did not start.
    """

    def __init__(self, world_size: int) -> None:
        self._pipes: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory(prefix="phalanx-mpi-")
        self.folder = self._folder.name
        address, key = os.path.join(self.folder, "judge"), os.urandom(16)
        environ = mpi_environment(_env.environment())
        environ |= {"PMIX_MCA_gds": "hash"} | ({"MPI4PY_MPIABI": "openmpi"} if shutil.which("mpirun.openmpi") else {})
        command = [mpirun() or "mpirun", "-n", str(world_size), sys.executable, "-m", __name__, self.folder, key.hex()]
        said = os.path.join(self.folder, "said")
        with Listener(address, "AF_UNIX", backlog=world_size, authkey=key) as listener, open(said, "wb") as output:
            self._process = subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
            try:
                listener._listener._socket.settimeout(_START_S)  # type: ignore[attr-defined]
                self._pipes += [listener.accept() for _ in range(world_size)]
            except OSError as error:
                with open(said, errors="replace") as text:
                    words = shortened(" ".join(text.read().split()), 1000)
                self.close()
                raise NoJudge(f"the ranks of MPI do not start ({error}): {shlex.join(command)} said: {words}") from None
            except BaseException:
                self.close()
                raise

    def run(self, program: Program, limit_s: float) -> None:
        """Make all ranks run the calls of a program; they write the results to `folder`, see `results_of`.

        Raises:
            RuntimeError: A rank failed or did not answer within `limit_s`.
        """
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps(program))
        for number, pipe in enumerate(self._pipes):
            if not pipe.poll(limit_s):
                raise RuntimeError(f"rank {number} of MPI has not answered within {limit_s:g} s")
            if words := pipe.recv_bytes().decode():
                raise RuntimeError(f"rank {number} of MPI: {words}")

    def close(self) -> None:
        """End the ranks: each rank ends when its socket is closed, and mpirun ends after the last rank."""
        for pipe in self._pipes:
            pipe.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._folder.cleanup()


def results_of(folder: str, rank: int) -> dict[int, list[Tensor]]:
    """Return the results of a rank of MPI, by step, as bytes; steps that MPI can't run are missing."""
    with open(os.path.join(folder, str(rank)), "rb") as file:
        found = pickle.load(file)
    return {
        step: [torch.frombuffer(bytearray(one), dtype=torch.uint8) if one else torch.empty(0, dtype=torch.uint8)
               for one in results]
        for step, results in found.items()
    }  # fmt: skip


# ---- a rank of MPI --------------------------------------------------------------------------------------------------


class _Group:
    """The part of a process group that a `Call` uses."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm

    def rank(self) -> int:
        return int(self.comm.Get_rank())

    def size(self) -> int:
        return int(self.comm.Get_size())


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _results(step: Step, call: Call, comm: Any) -> list[bytes] | None:
    """Make a call through MPI, and return the results of this rank; None if MPI can't make the call."""
    name, me, size = step.name, call.rank, call.size
    if step.is_reduction:
        return _reduced(step, call, comm)
    own = _bytes(call.of_rank(me))
    match name:
        case "broadcast" | "functional_broadcast":
            return [comm.bcast(own if me == call.root else None, call.root)]
        case "all_gather":
            return list(comm.allgather(own))
        case "all_gather_into_tensor" | "functional_all_gather":
            return [b"".join(comm.allgather(own))]
        case "all_gather_uneven":
            return list(comm.allgather(_bytes(call.of_rank(me, 0, uneven(call)[me]))))
        case "gather":
            return list(comm.gather(own, call.root) or [])
        case "scatter":
            blocks = [_bytes(call.of_rank(me, r)) for r in range(size)]
            return [comm.scatter(blocks if me == call.root else None, call.root)]
        case "all_to_all":
            return list(comm.alltoall([_bytes(call.of_rank(me, r)) for r in range(size)]))
        case "all_to_all_single":
            return [b"".join(comm.alltoall([_bytes(call.of_rank(me, r)) for r in range(size)]))]
        case "all_to_all_single_split" | "functional_all_to_all":
            sent, _ = splits(call)
            rows = call.of_rank(me, shape=(sum(sent), *(call.shape[1:] or call.shape))).split(sent)
            return [b"".join(comm.alltoall([_bytes(part) for part in rows]))]
        case "messages" | "batched_messages" | "blocking_messages" | "reordered_messages":
            return _messages(call, comm)
        case "barrier":
            comm.Barrier()
            return []
    return None


def _messages(call: Call, comm: Any) -> list[bytes]:
    planned = list(enumerate(messages_of(call)))
    sent = [
        comm.isend(_bytes(call.of_rank(one.src, i, (one.num,))), one.dst, one.tag % 1000)
        for i, one in planned
        if one.src == call.rank
    ]
    got = [comm.recv(source=one.src, tag=one.tag % 1000) for _, one in planned if one.dst == call.rank]
    for request in sent:
        request.wait()
    return got


def _reduced(step: Step, call: Call, comm: Any) -> list[bytes] | None:
    from mpi4py import MPI

    is_block = step.name in ("reduce_scatter", "reduce_scatter_tensor", "functional_reduce_scatter")
    is_known = is_block or step.name in ("all_reduce", "reduce", "functional_all_reduce")
    if not is_known or call.dtype not in _DATATYPES or step.reduce_op not in _OPS or step.values == "rare":
        return None
    datatype, op = getattr(MPI, _DATATYPES[call.dtype]), getattr(MPI, _OPS[step.reduce_op])
    found = []
    for block in range(call.size) if is_block else (0,):
        source = bytearray(_bytes(call.of_rank(call.rank, block)))
        target = bytearray(len(source))
        if source:
            comm.Allreduce([source, datatype], [target, datatype], op)
        found.append(bytes(target))
    if is_block:
        return [found[call.rank]]
    return found if step.name != "reduce" or call.rank == call.root else []


def _serve(folder: str, key: bytes) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank = world.Get_rank()
    comms: dict[tuple[int, ...], Any] = {}
    with Client(os.path.join(folder, "judge"), "AF_UNIX", authkey=key) as pipe:
        while True:
            try:
                program = pickle.loads(pipe.recv_bytes())
            except EOFError:
                return
            _answer(pipe, program, world, rank, comms, folder)


def _answer(
    pipe: Connection, program: Program, world: Any, rank: int, comms: dict[tuple[int, ...], Any], folder: str
) -> None:
    found: dict[int, list[bytes]] = {}
    words = ""
    try:
        for number, step in enumerate(program.steps):
            ranks = program.groups[step.group].ranks
            if rank not in ranks:
                continue
            if ranks not in comms:
                comms[ranks] = world.Create_group(world.Get_group().Incl(list(ranks)))
            group: Any = _Group(comms[ranks])
            if (results := _results(step, step.call(group), comms[ranks])) is not None:
                found[number] = results
        with open(os.path.join(folder, str(rank)), "wb") as file:
            pickle.dump(found, file)
    except Exception as error:  # sent to the parent, which then ends this rank
        words = f"{type(error).__name__}: {error}"
    pipe.send_bytes(words.encode())


if __name__ == "__main__":
    _serve(sys.argv[1], bytes.fromhex(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # not sys.exit, because MPI's exit functions wait for all ranks
