"""The program that ``mpirun`` runs for the doctor: an all_reduce over MPI, timed like those of torch's engines.

It imports mpi4py but not torch, so that a broken torch does not hide a working MPI.
"""

from __future__ import annotations

import array
import json

from phalanx.doctor.exercise import ITEM_BYTES, SIZE_BYTES, time_calls

TOLD = "doctor:"
"""Prefix of the line that rank 0 prints; the rest of the line is a JSON object."""


def main() -> None:
    """Check one all_reduce and time many; rank 0 prints the result."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    buffer = array.array("f", [comm.rank + 1.0]) * (SIZE_BYTES // ITEM_BYTES)

    def reduce() -> None:
        comm.Allreduce(MPI.IN_PLACE, buffer)

    reduce()
    right = comm.size * (comm.size + 1) / 2
    is_right = comm.allreduce(set(buffer) == {right}, MPI.LAND)
    buffer[:] = array.array("f", bytes(SIZE_BYTES))  # repeated sums of zeros stay finite
    seconds = time_calls(reduce, lambda number: float(comm.allreduce(number, MPI.MAX)))
    if comm.rank == 0:
        library = MPI.Get_library_version().split(",")[0].splitlines()[0].strip()
        told = {"size": comm.size, "is_right": is_right, "seconds": seconds, "library": library}
        print(TOLD + json.dumps(told))


if __name__ == "__main__":
    main()
