"""Run a function on several real ranks inside a test.

    def total(rank, world_size, num_elems):
        tensor = torch.full((num_elems,), float(rank))
        dist.all_reduce(tensor)
        return tensor.tolist()

    def test_all_reduce_sums_every_rank():
        assert run_ranks(total, 2, 3) == [[1.0] * 3] * 2

`run_ranks` returns the results of all ranks, or raises the first true failure. `spawn_ranks` yields the running ranks,
for tests that kill them, suspend them, or let them go on from point to point.

Ranks are forked from one server process that has imported torch, so a group of two starts in well under a tenth of a
second. A rank never outlives the test: it is killed at its time limit, at the end of the block, and when the test's own
process dies. Start with `ranks`, the test's side, then `rank`, the rank's side. Nothing here is used outside of tests:
no other package of phalanx imports it.
"""

from typing import TYPE_CHECKING

from phalanx import _on_first_use

if TYPE_CHECKING:  # for editors and type checkers; at run time, __getattr__ imports these names
    from phalanx.failure.ending import Ending, RankError
    from phalanx.launch.spawn.workers import start_server
    from phalanx.testing.rank import await_release, reached
    from phalanx.testing.ranks import Ranks, run_ranks, spawn_ranks

__all__ = [
    "Ending",
    "RankError",
    "Ranks",
    "await_release",
    "reached",
    "run_ranks",
    "spawn_ranks",
    "start_server",
]

_MODULES = {
    "failure.ending": "Ending RankError",
    "launch.spawn.workers": "start_server",
    "testing.rank": "await_release reached",
    "testing.ranks": "Ranks run_ranks spawn_ranks",
}

if not TYPE_CHECKING:  # with a module __getattr__, type checkers would accept any name
    __getattr__, __dir__ = _on_first_use(__name__, _MODULES)
