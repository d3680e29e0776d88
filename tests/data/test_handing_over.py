"""Batches on their way from the workers of a loader to its rank."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

import phalanx
from phalanx.data.handover.handing_over import _IN_WORK
from phalanx.testing import reached, run_ranks, spawn_ranks
from tests.data._batches import LARGE, Kinds, Lengths, OwnMemory, Records, Rows, Stream, every_kind, only, same, seed
from tests.denial import deny
from tests.shm import own_shm

# torch's own pickle of a quantized tensor warns as it is read.
pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
# Each worker imports torch there, so these tests take a minute in all.
IN_NEW_INTERPRETERS = [("missing", "forkserver"), ("missing", "spawn"), ("64 KiB", "spawn")]
SHM = {"64 KiB": b"size=64k", "64 MiB": b"size=64m", "read-only": None, "missing": None}


def open_files():
    """Return the number of open files of this process, without those that multiprocessing keeps open."""
    return len(os.listdir("/proc/self/fd"))


def resident_bytes():
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024


def blocks_mapped():
    """Return the inodes of the blocks that this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:phalanx-batch" in line}


def blocks_open():
    """Return the descriptors of blocks of this process; other threads may close theirs meanwhile."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found |= {fd} if "memfd:phalanx-batch" in os.readlink(f"/proc/self/fd/{fd}") else set()
    return found


@pytest.fixture(scope="module")
def needs_mounts():
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount another /dev/shm")


def load_with_shm(rank, world_size, kind, method):
    own_shm(SHM[kind], is_missing=kind == "missing")
    options = {"batch_size": 1, "collate_fn": only, "num_workers": 2, "multiprocessing_context": method}
    loaded = list(phalanx.DataLoader(Kinds(LARGE), **options))
    assert len(loaded) == 3
    assert all(same(batch, every_kind(LARGE)) for batch in loaded)
    records = phalanx.DataLoader(Records(1 << 20, 24), batch_size=4, num_workers=2, multiprocessing_context=method)
    assert [batch[:, -1].tolist() for batch in records] == [list(range(i, i + 4)) for i in range(0, 24, 4)]
    return len(os.listdir("/dev/shm")) if kind != "missing" else 0


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *((kind, "fork") for kind in SHM),
        *(pytest.param(kind, method, marks=pytest.mark.slow) for kind, method in IN_NEW_INTERPRETERS),
    ],
)
def test_any_batch_crosses_whatever_dev_shm_is(needs_mounts, kind, method):
    assert run_ranks(load_with_shm, 1, kind, method, init=False, timeout_s=240) == [0]


@pytest.mark.parametrize("length", [6, 40_000, LARGE])
def test_a_batch_of_every_kind_crosses(length):
    want = every_kind(length)
    for got in phalanx.DataLoader(Kinds(length, num_items=2), collate_fn=only, num_workers=1):
        assert [key for key in want if not same(got[key], want[key])] == []


@pytest.mark.parametrize(
    ("method", "is_persistent"),
    [("fork", False), ("forkserver", True), pytest.param("spawn", False, marks=pytest.mark.slow)],
)
def test_options_are_as_torch_has_them(method, is_persistent):
    options = {"num_workers": 2, "multiprocessing_context": method, "prefetch_factor": 3, "timeout": 240}
    options |= {"persistent_workers": is_persistent, "worker_init_fn": seed}
    for dataset, batch_size in ((Lengths(200_000, 20), None), (Stream(), 3)):
        ours, plain = (cls(dataset, batch_size, **options) for cls in (phalanx.DataLoader, DataLoader))
        for _ in range(2):
            one, other = list(ours), list(plain)
            assert len(one) == len(other)
            assert all(map(torch.equal, one, other))
        assert ours.collate_fn is plain.collate_fn
        assert type(ours.multiprocessing_context) is type(plain.multiprocessing_context)
        del ours, plain


def test_batches_lie_in_blocks_that_are_used_again():
    seen = set()
    for batch in phalanx.DataLoader(Records(1 << 20, 300), batch_size=1, num_workers=1):
        assert batch.is_shared()
        seen |= blocks_mapped()
        if len(seen) > 1 and batch[0, 0] == 100:
            fds, resident = open_files(), resident_bytes()
    assert len(seen) <= 2 + _IN_WORK
    assert open_files() <= fds
    assert resident_bytes() - resident < 8 << 20
    del batch
    gc.collect()
    assert not blocks_mapped()


def test_a_batch_that_is_kept_is_never_overwritten():
    kept = [batch for _, batch in phalanx.DataLoader(OwnMemory(), num_workers=2, batch_size=None)]
    assert [batch.unique().tolist() for batch in kept] == [[i] for i in range(60)]
    assert len(blocks_mapped()) == 60


def test_a_worker_holds_few_blocks_for_a_rank_that_keeps_all():
    loader = phalanx.DataLoader(OwnMemory(), num_workers=1, batch_size=None)
    kept = list(loader)
    assert max(num_held for num_held, _ in kept) <= 2 + _IN_WORK + 1


def test_a_part_that_is_kept_keeps_its_block():
    rows, arrays, grads = [], [], []
    for batch in phalanx.DataLoader(Records(200_000, 40), batch_size=1, num_workers=1):
        (rows, arrays, grads)[int(batch[0, 0]) % 3].append(
            (batch[0, -5:], batch.numpy(), (torch.ones(1, requires_grad=True) * batch).grad_fn)[int(batch[0, 0]) % 3]
        )
    assert [row.tolist() for row in rows] == [[i] * 5 for i in range(0, 40, 3)]
    assert [array.min() for array in arrays] == [array.max() for array in arrays] == list(range(1, 40, 3))
    sums = [round(fn(torch.ones(1, 200_000))[0].mean().item(), 3) for fn in grads]
    assert sums == list(range(2, 40, 3))


def test_views_take_no_more_than_their_own_bytes():
    loader = phalanx.DataLoader(Rows(50, 20_000), batch_size=4, collate_fn=list, num_workers=1)
    for number, batch in enumerate(loader):
        assert [row[0].item() for row in batch] == [20_000 * i for i in range(4 * number, min(50, 4 * number + 4))]
        assert all(row.untyped_storage().nbytes() <= 160_000 + 64 for row in batch)


def overlapping(samples):
    return samples[0][:10_000], samples[0][5_000:]


def test_views_that_overlap_still_do():
    for one, other in phalanx.DataLoader(Rows(3, 20_000), batch_size=1, collate_fn=overlapping, num_workers=1):
        one[5_000:] = -1
        assert (other[:5_000] == -1).all()
        assert (other[5_000:] > 0).all()


def unpicklable(samples):
    return lambda: samples


def test_a_batch_that_cannot_be_pickled_is_an_error():
    with pytest.raises(Exception, match="pickle local object"):
        list(phalanx.DataLoader(Records(8, 2), collate_fn=unpicklable, num_workers=1))
    gc.collect()  # the error's frames hold the iterator


def collated_twice(samples):
    batch = default_collate(samples)
    return {"batch": batch, "again": batch, "part": batch[:, :10]}


def test_a_batch_of_torchs_collate_function_is_not_copied():
    for batch in phalanx.DataLoader(Records(1 << 20, 20), batch_size=2, collate_fn=collated_twice, num_workers=1):
        assert batch["again"] is batch["batch"]
        batch["batch"][:] = 255
        assert (batch["part"] == 255).all()


def read_when_told(batches, told, results):
    batch = batches.get()
    told.wait(60)
    results.put(batch.unique().tolist())


def test_a_batch_that_was_sent_on_is_never_overwritten():
    run_ranks(send_on, 1, init=False, timeout_s=120)  # in a process of its own, because a thread serves what was sent


def send_on(rank, world_size):
    context = multiprocessing.get_context("spawn")
    batches, told, results = context.Queue(), context.Event(), context.Queue()
    reader = context.Process(target=read_when_told, args=(batches, told, results))
    reader.start()
    for number, batch in enumerate(phalanx.DataLoader(Records(200_000, 40), batch_size=1, num_workers=1)):
        if number == 7:
            batches.put(batch)
    told.set()
    assert results.get(timeout=60) == [7]
    reader.join()
    for queue in (batches, results):
        queue.close()
        queue.join_thread()


def test_a_fork_keeps_the_batches_that_the_rank_had():
    told, tell = os.pipe()
    for number, batch in enumerate(phalanx.DataLoader(Records(200_000, 60), batch_size=1, num_workers=1)):
        if number == 7:
            child = os.fork()
            if child == 0:
                os.close(tell)
                os.read(told, 1)
                os._exit(not (batch.numpy() == 7).all())  # torch's threads are not in a forked child
        assert batch.unique().tolist() == [number]
    os.close(tell)
    os.close(told)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("is_missing", [False, True])
def test_torch_hands_over_where_there_is_no_memfd(is_missing):
    run_ranks(load_without_memfd, 1, is_missing, init=False, timeout_s=120)


def load_without_memfd(rank, world_size, is_missing):
    deny("memfd_create", error=errno.ENOSYS if is_missing else errno.EPERM)
    loaded = torch.cat(list(phalanx.DataLoader(Records(100_000, 10), batch_size=2, num_workers=2)))
    assert loaded[:, 9].tolist() == list(range(10))
    assert not blocks_mapped()


def load_from_a_killed_worker():
    for batch in phalanx.DataLoader(Records(200_000, 40, fatal=20), batch_size=1, num_workers=2):
        assert len(batch.unique()) == 1


def test_a_killed_worker_leaves_nothing():
    # torch says which signal it was only if its own handler of SIGCHLD is in place. The handler raises the error at
    # whatever line the rank is; in a frame that has ended, because pytest's `assert` keeps its values in the frame.
    with pytest.raises(RuntimeError, match=r"DataLoader worker .* (killed by signal: Killed|exited unexpectedly)"):
        load_from_a_killed_worker()
    gc.collect()
    assert not blocks_mapped()


class InterruptAt:
    """Raises an error at the n-th call of a function of ours that has to do with blocks, as a signal handler may."""

    def __init__(self, number, folders):
        self.number, self.folders = number, folders
        self.num_calls, self.where = 0, ""

    def __call__(self, frame, event, argument):
        path = frame.f_code.co_filename
        is_ours = any(f"/phalanx/data/{folder}/" in path for folder in self.folders)
        if event == "call" and (is_ours or path.endswith(("/weakref.py", "/_weakrefset.py"))):
            self.num_calls += 1
            if self.num_calls == self.number:
                self.where = str(frame)
                raise KeyboardInterrupt


def interrupt_anywhere(rank, world_size, folders):
    sys.unraisablehook = lambda error: None  # such as an error in a weak reference's function, of which Python tells
    for number in itertools.count(1):
        interrupt = InterruptAt(number, folders)
        batches = iter(phalanx.DataLoader(Records(200_000, 3), batch_size=1, num_workers=1))
        sys.setprofile(interrupt)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                for batch in batches:
                    del batch
            del batches
        finally:
            sys.setprofile(None)
        gc.collect()
        assert not blocks_mapped() | blocks_open(), interrupt.where
        if interrupt.num_calls < number:
            return number


@pytest.mark.parametrize(
    "folders", [["handover"], pytest.param(["handover", "workers"], marks=pytest.mark.slow)], ids=["handover", "all"]
)
def test_a_loop_that_is_interrupted_anywhere_leaves_nothing(folders):
    (num_calls,) = run_ranks(interrupt_anywhere, 1, folders, init=False, timeout_s=400)
    assert num_calls > 20


def load_until_killed(rank, world_size):
    loader = phalanx.DataLoader(Records(1 << 20, 1000), batch_size=1, num_workers=2)
    for number, _ in enumerate(loader):
        if number == 10:
            reached("loading", [child.pid for child in multiprocessing.active_children()])
            signal.pause()


def test_workers_of_a_killed_rank_end():
    with spawn_ranks(load_until_killed, 1, init=False) as ranks:
        (workers,) = ranks.wait_until_reached("loading")
        assert len(workers) == 2
        ranks.kill(0)
        deadline = time.monotonic() + 20
        while any(os.path.exists(f"/proc/{pid}/fd") and os.listdir(f"/proc/{pid}/fd") for pid in workers):
            assert time.monotonic() < deadline
            time.sleep(0.05)
