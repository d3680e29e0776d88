"""Strangers stay out: other users, other jobs, forked children."""

from __future__ import annotations

import concurrent.futures
import fcntl
import os
import signal
import socket
import threading

import pytest
import torch
import torch.distributed as dist

from phalanx import _core
from phalanx.testing import await_release, reached, spawn_ranks

_NOBODY = 65534


def need_root():
    if os.geteuid() != 0:
        pytest.skip("only root can run a process as another user")


def as_nobody(act):
    """Run `act` in a child of another user and return its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.setgroups([])
            os.setgid(_NOBODY)
            os.setuid(_NOBODY)
            code = act()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def ask_for_the_segment(name):
    """Return 0 if the server hangs up without a descriptor, 1 if it hands one over."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect("\0" + name)
        data, descriptors, _, _ = socket.recv_fds(client, 1, 1)
    return 1 if data or descriptors else 0


class Serving:
    """A segment that is offered to one peer, in a thread."""

    def __init__(self):
        self.segment = _core.Segment.create()
        self.server = _core.SegmentServer(self.segment)
        self.served = None
        self._thread = threading.Thread(target=self._serve)

    def _serve(self):
        self.served = self.server.serve(1, 10.0)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._thread.join()


def add_up(rank, world_size, base):
    reached("up")
    tensor = torch.full((1 << 16,), float(base + rank))
    for _ in range(20):
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        total = tensor.clone()
        dist.all_reduce(total)
    await_release("done")
    return total[0].item()


class Numbers(torch.utils.data.Dataset):
    """Its worker dies at one of the items."""

    def __init__(self, deadly):
        self.deadly = deadly

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return float(index)


def load_with_workers(rank, world_size):
    before = torch.ones(1 << 16)
    dist.all_reduce(before)
    loader = torch.utils.data.DataLoader(
        Numbers(deadly=-1), batch_size=4, num_workers=1, multiprocessing_context="fork"
    )
    loaded = torch.cat(list(loader)).sum()
    dist.all_reduce(loaded)
    if rank == 0:
        dying = torch.utils.data.DataLoader(
            Numbers(deadly=5), batch_size=4, num_workers=1, multiprocessing_context="fork"
        )
        with pytest.raises(RuntimeError, match="DataLoader worker"):
            list(dying)
    after = torch.ones(1 << 16)
    dist.all_reduce(after)
    return loaded.item(), after[0].item()


def test_another_user_gets_no_segment():
    need_root()
    with Serving() as offer:
        assert as_nobody(lambda: ask_for_the_segment(offer.server.name)) == 0
        assert offer.served is None, "a refused stranger must not count as a peer"
        attached = _core.Segment.attach(offer.server.name, offer.segment.nonce, timeout_s=10)
    assert offer.served == 1
    assert attached.nonce == offer.segment.nonce


def test_the_segment_of_another_user_is_refused():
    need_root()
    name = f"phalanx-stranger-{os.getpid()}"
    ready_to_end, end = os.pipe()
    listening, started = os.pipe()

    def serve():
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("\0" + name)
            listener.listen()
            os.write(started, b"x")
            os.read(ready_to_end, 1)
        return 0

    codes = []
    stranger = threading.Thread(target=lambda: codes.append(as_nobody(serve)))
    stranger.start()
    try:
        assert os.read(listening, 1) == b"x"
        with pytest.raises(PermissionError, match="another user"):
            _core.Segment.attach(name, "0" * 32, timeout_s=10)
    finally:
        os.write(end, b"x")
        stranger.join()
        for fd in (ready_to_end, end, listening, started):
            os.close(fd)
    assert codes == [0]


def test_a_segment_with_another_nonce_is_refused():
    with Serving() as offer, pytest.raises(RuntimeError, match="not the one that was announced"):
        _core.Segment.attach(offer.server.name, "0" * 32, timeout_s=10)


def test_a_peer_that_dies_before_it_is_served_does_not_count():
    segment = _core.Segment.create()
    server = _core.SegmentServer(segment)
    for _ in range(2):
        with socket.socket(socket.AF_UNIX) as gone:
            gone.connect("\0" + server.name)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        served = pool.submit(server.serve, 1, 10.0)
        attached = _core.Segment.attach(server.name, segment.nonce, timeout_s=10)
        assert served.result() == 1
    assert attached.nonce == segment.nonce


def test_who_waits_for_a_segment_that_nobody_serves_gives_up():
    server = _core.SegmentServer(_core.Segment.create())
    with pytest.raises(TimeoutError, match="waiting for the shared segment"):
        _core.Segment.attach(server.name, "0" * 32, timeout_s=0.1)
    name = server.name
    del server
    with pytest.raises(ConnectionRefusedError, match="connect to rank 0"):
        _core.Segment.attach(name, "0" * 32, timeout_s=10)


@pytest.mark.parametrize("answer", [b"", b"P"], ids=["nothing", "no descriptor"])
def test_an_answer_without_a_segment_is_a_refusal(answer):
    with socket.socket(socket.AF_UNIX) as listener, concurrent.futures.ThreadPoolExecutor(1) as pool:
        name = f"phalanx-refusing-{os.getpid()}-{len(answer)}"
        listener.bind("\0" + name)
        listener.listen()
        attached = pool.submit(_core.Segment.attach, name, "0" * 32, 10.0)
        with listener.accept()[0] as peer:
            peer.send(answer)
        with pytest.raises(PermissionError, match="the shared segment was refused"):
            attached.result()


@pytest.mark.parametrize(
    ("seals", "num_bytes", "says"),
    [
        (0, 0, "not a phalanx segment"),
        (fcntl.F_SEAL_SHRINK, 0, "0 bytes"),
        (fcntl.F_SEAL_SHRINK, 4096, "different versions of phalanx"),
    ],
    ids=["may shrink", "empty", "without our header"],
)
def test_memory_that_is_no_segment_is_refused_and_not_touched(seals, num_bytes, says):
    memory = os.memfd_create("stranger", os.MFD_ALLOW_SEALING)
    os.truncate(memory, num_bytes)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
    with socket.socket(socket.AF_UNIX) as listener:
        name = f"phalanx-empty-{os.getpid()}-{seals}-{num_bytes}"
        listener.bind("\0" + name)
        listener.listen()

        def hand_over():
            with listener.accept()[0] as peer:
                socket.send_fds(peer, [b"P"], [memory])

        giver = threading.Thread(target=hand_over)
        giver.start()
        with pytest.raises(RuntimeError, match=says):
            _core.Segment.attach(name, "0" * 32, timeout_s=10)
        giver.join()
    os.close(memory)


@pytest.mark.parametrize("offset", [1, 1 << 21, (1 << 63) - 4096], ids=["within a page", "behind the end", "far away"])
def test_a_group_that_lies_outside_of_its_segment_is_refused_and_not_touched(offset):
    segment = _core.Segment.create()
    segment.create_group(1)
    with pytest.raises(RuntimeError, match=f"at offset {offset} lie outside the shared segment"):
        _core.Group.make(segment, offset, 0, 1, "late", [0], timeout_s=1, stall_s=0, spin_us=0)


def test_a_group_of_another_size_is_refused():
    segment = _core.Segment.create()
    offset = segment.create_group(2)
    with pytest.raises(RuntimeError, match="the ranks disagree about the size of group 'late'"):
        _core.Group.make(segment, offset, 0, 1, "late", [0], timeout_s=1, stall_s=0, spin_us=0)


def test_two_jobs_at_once_do_not_meet():
    with spawn_ranks(add_up, 2, 0) as one, spawn_ranks(add_up, 3, 10) as other:
        for job in (one, other):
            job.wait_until_reached("up")
        for job in (one, other):
            job.release("done")
        results = [[outcome.value for outcome in job.join(30)] for job in (one, other)]
    assert results == [[2.0] * 2, [36.0] * 3]


def test_a_forked_worker_that_dies_does_not_disturb_its_rank(run_ranks):
    assert run_ranks(load_with_workers, 2, group_timeout_s=20) == [(56.0, 2.0)] * 2
