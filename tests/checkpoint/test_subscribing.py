"""Publishers and readers in processes of their own: whole versions, kills on either side, forks, other users."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import resource
import select
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import phalanx
from phalanx import NotPublished, OutOfSharedMemory, PhalanxError
from phalanx._errors import ArgumentError
from phalanx.checkpoint.publication import records
from phalanx.testing import await_release, reached, spawn_ranks
from tests.checkpoint._names import new_name

pytestmark = pytest.mark.kept_ranks

_NUM_VERSIONS, _LENGTH = 150, 50_000
PLAIN = {"backend": None, "init": False}


@pytest.fixture
def name():
    with new_name() as made:
        yield made


def error_of(kind, call, *args, **options):
    """Return the error of a call, without the frames that would keep its tensors."""
    with pytest.raises(kind) as caught:
        call(*args, **options)
    return caught.value.with_traceback(None)


def in_a_fork(function):
    """Fork, run `function` in the child, and return what it returned, or its error."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            answer = function()
        except BaseException as error:
            answer = error.with_traceback(None)
        os.write(writer, pickle.dumps(answer))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pickle.loads(pipe.read())
    assert os.waitpid(pid, 0)[1] == 0
    return answer


# ---- whole versions ----------------------------------------------------------------------------------------------


def publish_numbers(name, in_place):
    publication = phalanx.publish([torch.zeros(_LENGTH), torch.zeros(()), 0], name)
    for version in range(1, _NUM_VERSIONS):
        state = publication.buffers() if in_place else [torch.empty(_LENGTH), torch.empty(()), 0]
        state[0].fill_(float(version))
        state[1].fill_(float(version))
        state[2] = version
        publication.update(state)
    publication.close()


def read_numbers(name, how):
    """Return how many versions were seen, each of which was whole and newer than the one before."""
    last, count, kept = -1, 0, []
    with phalanx.subscribe(name, timeout_s=60) as subscription:
        subscription.wait()
        reached("reading")
        while last < _NUM_VERSIONS - 1:
            try:
                newest = subscription.wait() if how == "wait" else subscription.latest()
            except NotPublished as error:
                if not error.is_closed:
                    raise
                break  # the last was closed before this looked
            large, small, plain = newest.state
            assert large.min() == large.max() == small == plain
            assert plain >= last
            count += plain > last
            last = plain
            kept = [*kept, (plain, large)][-2:]
            if how != "wait" and subscription.has_ended:
                break
    assert all((large == plain).all() for plain, large in kept)
    return count


def numbers(rank, world_size, name, in_place):
    if rank:
        return read_numbers(name, "wait" if rank == 1 else "latest")
    phalanx.publish([torch.full((_LENGTH,), -1.0), torch.tensor(-1.0), -1], name)
    await_release("go")
    publish_numbers(name, in_place)
    return 0


@pytest.mark.parametrize("in_place", [False, True], ids=["copied", "in place"])
def test_readers_see_whole_versions_in_order_while_one_of_them_is_killed(name, in_place):
    with spawn_ranks(numbers, 4, name, in_place, **PLAIN) as ranks:
        ranks.wait_until_reached("reading", [1, 2, 3])
        ranks.release("go", ranks=[0])
        ranks.kill(3)
        endings = ranks.join()
    assert [one.ok for one in endings] == [True, True, True, False]
    assert endings[0].value == 0 < endings[1].value <= _NUM_VERSIONS


def train_and_evaluate(rank, world_size, name):
    """Rank 0 of a group publishes, rank 1 reads: in one job, beside collectives."""
    seen = []
    subscription = phalanx.subscribe(name, timeout_s=60)
    for step in range(4):
        weight = torch.full((10,), float(rank + step))
        dist.all_reduce(weight)
        if rank == 0:
            phalanx.publish({"weight": weight, "step": step}, name)
        dist.barrier()
        newest = subscription.latest()
        seen.append((newest.version, newest.state["step"], newest.state["weight"][0].item()))
        dist.barrier()
    error = error_of(PhalanxError, phalanx.publish, 1, name) if rank else None
    dist.barrier()
    if rank == 0:
        phalanx.publish(None, name).close()
    return seen, str(error), os.getpid()


def test_a_rank_publishes_to_the_others_and_a_second_one_is_refused_by_pid(run_ranks, name):
    [(seen, _, pid), (other, error, _)] = run_ranks(train_and_evaluate, 2, name)
    assert seen == other == [(step + 1, step, 2.0 * step + 1) for step in range(4)]
    assert f"publish('{name}'): process {pid}" in error
    assert "publishes under that name. In a job, call it on one rank only (if rank == 0)" in error
    assert "phalanx explain already-published" in error


# ---- kills -------------------------------------------------------------------------------------------------------


def publish_until_killed(rank, world_size, name):
    if rank == 0:
        phalanx.publish(torch.full((1000,), 1.0), name)
        reached("published")
        time.sleep(60)
    with phalanx.subscribe(name, timeout_s=60) as subscription:
        first = subscription.wait()
        if rank == 1:
            child = os.fork()
            if child == 0:  # a child of a reader; it is killed at the end
                time.sleep(60)
        reached("has it")
        error = error_of(NotPublished, subscription.wait)
        assert subscription.latest() is first
        assert first.state.sum() == 1000
        assert subscription.has_ended
        if rank == 1:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            await_release("rank 2 knows of the end")
            return error, phalanx.publish(torch.full((1000,), 2.0), name).version, await_release("end")
        reached("knows of the end")
        second = subscription.wait()
        assert (second.version, second.state.sum()) == (2, 2000)
        reached("has the next")
        return error, subscription.has_ended, None


def test_readers_of_a_killed_publisher_keep_its_last_version_learn_of_its_end_and_follow_the_next(name):
    with spawn_ranks(publish_until_killed, 3, name, **PLAIN) as ranks:
        ranks.wait_until_reached("has it", [1, 2])
        ranks.kill(0)
        ranks.wait_until_reached("knows of the end", [2])
        ranks.release("rank 2 knows of the end", ranks=[1])
        ranks.wait_until_reached("has the next", [2])
        ranks.release("end", ranks=[1])
        killed, *others = ranks.join()
    assert killed.signal == signal.SIGKILL
    for ending, found in zip(others, (2, False), strict=True):
        error, value, _ = ending.value
        assert (error.has_ended, error.is_closed, error.pid, error.version) == (True, False, killed.pid, 1)
        assert f"process {killed.pid} has ended after version 1 without closing it" in str(error)
        assert value == found


def hold_a_version(rank, world_size, name):
    if rank:
        held = phalanx.subscribe(name, timeout_s=60).wait()
        reached("held", held.version)
        time.sleep(60)
    publication = phalanx.publish(torch.zeros(1000), name, max_versions=2)
    pid = await_release("held")
    error = error_of(OutOfSharedMemory, publication.update, torch.ones(1000)) if publication.update([]) else None
    reached("full", str(error))
    await_release("killed")
    version = publication.update(torch.ones(1000))
    publication.close()
    return f"version 1 by process {pid}" in str(error), version


def test_what_a_killed_reader_has_held_is_free(name):
    with spawn_ranks(hold_a_version, 2, name, **PLAIN) as ranks:
        ranks.wait_until_reached("held", [1])
        ranks.release("held", ranks.pids[1], ranks=[0])
        ranks.wait_until_reached("full", [0])
        ended = os.pidfd_open(ranks.pids[1])
        ranks.kill(1)
        select.select([ended], [], [], 30)
        os.close(ended)
        ranks.release("killed", ranks=[0])
        endings = ranks.join()
    assert endings[0].value == (True, 3), endings[0].error


def interrupted(rank, world_size, name):
    try:
        reached("waits")
        phalanx.subscribe(name).wait()
    except KeyboardInterrupt:
        return "interrupted"


def test_ctrl_c_ends_a_wait(name):
    with spawn_ranks(interrupted, 1, name, **PLAIN) as ranks:
        ranks.wait_until_reached("waits")
        ranks.kill(0, signal.SIGINT)
        assert ranks.join()[0].value == "interrupted"


# ---- forks -------------------------------------------------------------------------------------------------------


def fork_a_publisher(rank, world_size, name):
    publication = phalanx.publish(torch.zeros(5), name)

    def as_child():
        errors = [
            error_of(ArgumentError, publication.update, 1),
            error_of(ArgumentError, publication.buffers),
            error_of(PhalanxError, phalanx.publish, 1, name),
        ]
        publication.close()  # nothing: it is the parent's
        return [str(error) for error in errors], phalanx.subscribe(name).latest().state.tolist()

    with publication._busy:  # as a thread may at the fork
        errors, seen = in_a_fork(as_child)
    assert seen == [0.0] * 5
    assert publication.update(torch.ones(5)) == 2
    publication.close()
    return errors, os.getpid()


def test_a_fork_of_the_publisher_is_none(run_ranks, name):
    [(errors, pid)] = run_ranks(fork_a_publisher, 1, name, **PLAIN)
    assert f"process {pid} publishes it, and this is a fork" in errors[0]
    assert "call buffers() there, or publish under another name here" in errors[1]
    assert f"publish('{name}'): process {pid}" in errors[2]


def fork_while_buffers_are_lent(rank, world_size, name):
    publication = phalanx.publish(torch.zeros(5), name)
    go, let = os.pipe()
    state = publication.buffers().fill_(1.0)
    if (child := os.fork()) == 0:
        os.read(go, 1)
        state.fill_(666.0)
        os._exit(0)
    publication.update(state)
    held = phalanx.subscribe(name).latest()
    os.write(let, b"1")
    os.waitpid(child, 0)
    seen = [held.state.tolist()]
    for value in (2.0, 3.0):
        held = None
        state = publication.buffers().fill_(value)
        publication.update(state)
        seen.append(phalanx.subscribe(name).latest().state.tolist())
    publication.close()
    os.close(go), os.close(let)
    return seen


def test_a_fork_that_has_inherited_buffers_changes_no_version(run_ranks, name):
    assert run_ranks(fork_while_buffers_are_lent, 1, name, **PLAIN) == [[[1.0] * 5, [2.0] * 5, [3.0] * 5]]


def outlive_a_publisher(rank, world_size, name):
    """A publisher is killed; its child, which shares all it had open, lives on while another publishes."""
    ready, said = os.pipe()
    end, stays = os.pipe()
    if (publisher := os.fork()) == 0:
        os.close(stays)
        phalanx.publish(torch.zeros(5), name)
        if os.fork() == 0:
            os.write(said, b"1")
            os.read(end, 1)
            os._exit(0)
        time.sleep(60)
    os.read(ready, 1)
    subscription = phalanx.subscribe(name)
    before = subscription.latest().version, subscription.has_ended
    os.kill(publisher, signal.SIGKILL)
    os.waitpid(publisher, 0)
    has_ended = subscription.has_ended
    publication = phalanx.publish(torch.ones(5), name)
    after = subscription.latest().version, subscription.has_ended
    publication.close()
    for fd in (ready, said, end, stays):
        os.close(fd)
    return before, has_ended, after


def test_the_child_of_a_killed_publisher_does_not_keep_its_name(run_ranks, name):
    assert run_ranks(outlive_a_publisher, 1, name, **PLAIN) == [((1, False), True, (2, False))]


def keep_in_a_fork(rank, world_size, name):
    """A reader forks a child and drops its version, which the child still has."""
    publication = phalanx.publish(torch.full((1000,), 1.0), name, max_versions=2)
    held = phalanx.subscribe(name).latest()
    go_on, proceed = os.pipe()
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(proceed)
        os.read(go_on, 1)
        os.write(writer, str(int(held.state.sum())).encode())
        os._exit(0)
    del held
    gc.collect()
    publication.update(torch.full((1000,), 2.0))
    error_of(OutOfSharedMemory, publication.update, torch.full((1000,), 3.0))
    os.close(proceed)
    seen = os.read(reader, 10)
    os.waitpid(pid, 0)
    publication.update(torch.full((1000,), 3.0))
    publication.close()
    for fd in (go_on, reader, writer):
        os.close(fd)
    return seen


def test_a_forked_child_keeps_the_version_that_its_parent_has_dropped(run_ranks, name):
    assert run_ranks(keep_in_a_fork, 1, name, **PLAIN) == [b"1000"]


class OfThePolicy(Dataset):
    def __init__(self, name):
        self.subscription = phalanx.subscribe(name, timeout_s=60)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        newest = self.subscription.latest()
        return newest.version, newest.state["weight"][index]


def load_by_workers(rank, world_size, name, context):
    publication = phalanx.publish({"weight": torch.arange(4.0)}, name)
    data = OfThePolicy(name)
    assert data[0] == (1, 0.0)
    publication.update({"weight": torch.arange(4.0) * 2})
    loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context=context)
    [(versions, values)] = list(loader)
    publication.close()
    return versions.tolist(), values.tolist()


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_of_a_data_loader_read(run_ranks, name, context):
    assert run_ranks(load_by_workers, 1, name, context, **PLAIN) == [([2] * 4, [0.0, 2.0, 4.0, 6.0])]


# ---- other users, containers, limits -----------------------------------------------------------------------------


def read_as_nobody(rank, world_size, name):
    publication = phalanx.publish(torch.ones(3), name)
    record = records.find(name)

    def as_nobody():
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        refused = [error_of(NotPublished, phalanx.subscribe(name).latest)]
        for path in (f"/proc/{record.pid}/fd/{record.fd}", *map(str, records.common_files("."))):
            with contextlib.suppress(PermissionError):
                os.open(path, os.O_RDONLY)
                refused.append(path)
        return [str(one) for one in refused]

    answer = in_a_fork(as_nobody)
    publication.close()
    return answer


def test_another_user_finds_nothing_and_may_open_nothing(run_ranks, name):
    if os.geteuid() != 0:
        pytest.skip("needs root, to be another user")
    [[message]] = run_ranks(read_as_nobody, 1, name, **PLAIN)
    assert "nobody has published under that name" in message


def publish_in_a_container(rank, world_size, name):
    if ctypes.CDLL(None, use_errno=True).unshare(0x20000000) != 0:  # CLONE_NEWPID: for its children
        pytest.skip("needs the right to make a pid namespace")
    ready, said = os.pipe()
    end, stays = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(stays)
        phalanx.publish(torch.ones(3), name)
        os.write(said, b"1")
        os.read(end, 1)
        os._exit(0)
    os.read(ready, 1)
    errors = [
        error_of(PhalanxError, phalanx.subscribe(name).latest),
        error_of(PhalanxError, phalanx.publish, torch.ones(3), name),
    ]
    for fd in (stays, end, ready, said):
        os.close(fd)
    os.waitpid(pid, 0)
    return [str(error) for error in errors]


def test_a_publisher_in_another_pid_namespace_is_refused_in_words(run_ranks, name):
    [errors] = run_ranks(publish_in_a_container, 1, name, **PLAIN)
    for error in errors:
        assert "was published by process 1 of another container (pid namespace), whose memory can't be mapped" in error
        assert f"publication-{name}" in error


def read_within_limits(rank, world_size, name, num_free):
    """Return the error of a reader that can open so many files more; None: that has no address space."""
    publication = phalanx.publish(torch.ones(64 << 20, dtype=torch.uint8), name)

    def limited():
        subscription = phalanx.subscribe(name)
        if num_free is not None:
            soft = 1 + max(map(int, os.listdir("/proc/self/fd")))
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft))
            taken = []
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.dup(0))
            for fd in taken[:num_free]:
                os.close(fd)
        else:
            with open("/proc/self/statm") as file:
                used = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), resource.RLIM_INFINITY))
        return error_of(PhalanxError, subscription.latest)

    error = in_a_fork(limited)
    publication.close()
    return error


@pytest.mark.parametrize(
    ("num_free", "kind", "words"),
    [
        (None, OutOfSharedMemory, "can't be mapped: Cannot allocate memory; free memory or descriptors, or raise"),
        (1, OutOfSharedMemory, "can't be mapped: Too many open files; free memory or descriptors, or raise"),
        (0, PhalanxError, "can't be opened: Too many open files; raise the limit (ulimit -n)"),
    ],
    ids=["address space", "one file", "no file"],
)
def test_a_reader_at_a_limit_says_so(run_ranks, name, num_free, kind, words):
    [error] = run_ranks(read_within_limits, 1, name, num_free, **PLAIN)
    assert type(error) is kind
    assert words in str(error)
