"""Run by tests/test_plugin.py in a pytest of its own: what each of these does is asserted there."""
# ruff: noqa: PT009 a TestCase as others write it

import asyncio
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
import unittest
import warnings

import hypothesis
import hypothesis.strategies
import pytest
import torch
import torch.distributed as dist

MAIN = os.getpid()


@pytest.fixture(scope="session")
def data():
    return os.getpid(), torch.ones(1000)


@pytest.fixture
def seeded():
    random.seed(3)
    torch.manual_seed(3)
    return random.getstate(), torch.get_rng_state()


@pytest.fixture
def of_rank(rank, data, tmp_path):
    yield rank, os.getpid(), data[0]
    (tmp_path / f"torn_down_{rank}_{os.getpid()}").touch()


@pytest.fixture
def torn_down(tmp_path):
    yield
    left = sorted(path.name.split("_")[2] for path in tmp_path.glob("torn_down_*"))
    assert left == ["0", "1"], left


@pytest.mark.ranks(2)
def test_fixtures(torn_down, of_rank, data, rank, world_size, tmp_path):
    assert of_rank == (rank, os.getpid(), MAIN)
    assert data[0] == MAIN != os.getpid()
    assert world_size == dist.get_world_size() == 2
    (tmp_path / f"seen_{rank}").touch()
    dist.barrier()
    assert len(list(tmp_path.glob("seen_*"))) == 2


@pytest.mark.ranks(2)
def test_random_numbers_go_on_from_the_parents(seeded):
    assert random.getstate() == seeded[0]
    assert torch.equal(torch.get_rng_state(), seeded[1])


@pytest.mark.ranks(2, backend="gloo", env={"GIVEN": "yes"})
def test_session(group):
    assert (group.rank, group.world_size) == (dist.get_rank(), 2)
    assert "gloo" in group.backend
    assert os.environ["GIVEN"] == "yes"
    assert torch.get_num_threads() == 1


@pytest.mark.ranks(4, hosts=[2, 2])
def test_hosts():
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [4.0] * 3
    assert os.environ["PHALANX_HOST"] == f"host-{dist.get_rank() // 2}"


class TestMethods:
    @pytest.mark.parametrize("number", [7])
    @pytest.mark.ranks([1, 2])
    def test_method(self, number, world_size):
        assert number == 7
        assert world_size == dist.get_world_size()


@pytest.mark.ranks(2)
class TestUnit(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.pid = os.getpid()

    def setUp(self):
        self.own_pid = os.getpid()

    def test_passes(self):
        self.assertEqual(self.pid, MAIN)
        self.assertEqual(self.own_pid, os.getpid())
        self.assertNotEqual(self.own_pid, MAIN)

    def test_fails(self):
        self.assertEqual(dist.get_rank(), 0)

    def test_skips(self):
        self.skipTest("because")


@pytest.mark.ranks(2)
class TestAsync(unittest.IsolatedAsyncioTestCase):
    async def test_waits(self):
        await asyncio.sleep(0)
        assert dist.get_world_size() == 2


@pytest.mark.ranks(1, 2)
class TestSizes(unittest.TestCase):
    def test_two_sizes(self):
        assert dist.get_world_size() == 1


@pytest.mark.ranks(2)
def test_skips():
    pytest.skip("not today")


@pytest.mark.ranks(2)
def test_lacks_a_module():
    pytest.importorskip("no_such_module")


@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=ValueError, strict=True)
def test_is_expected_to_fail():
    raise ValueError("as expected")


@pytest.mark.ranks(2)
def test_expects_to_fail(request):
    request.applymarker(pytest.mark.xfail(reason="as expected"))
    assert dist.get_world_size() == 1


@pytest.mark.ranks(2)
def test_expects_to_fail_on_one_rank_and_fails_on_another(request, rank):
    if rank == 1:
        request.applymarker(pytest.mark.xfail)
    dist.barrier()
    assert dist.get_rank() == 2


@pytest.mark.ranks(2)
@hypothesis.settings(max_examples=3, database=None, deadline=None)
@hypothesis.given(number=hypothesis.strategies.integers())
def test_tries_examples(number):
    numbers = [None, None]
    dist.all_gather_object(numbers, number)
    assert numbers == [number, number]


@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=ValueError, strict=True)
def test_fails_otherwise_than_expected():
    raise KeyError("other")


@pytest.mark.ranks(2)
def test_one_fails(rank):
    secret = rank + 41
    if rank == 1:
        assert secret == 0
    dist.barrier()


@pytest.mark.ranks(2)
def test_both_fail():
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == 5


@pytest.mark.ranks(2)
def test_calls_different_things(rank):
    dist.all_reduce(torch.ones(2 + rank))


@pytest.mark.ranks(2)
def test_raises_a_local_class():
    class Odd(Exception):
        pass

    raise Odd("strange")


@pytest.mark.ranks(3)
def test_is_killed(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.ranks(2)
def test_leaves(rank):
    if rank == 1:
        os._exit(3)
    dist.barrier()


@pytest.mark.ranks(2)
def test_exits_without_a_code(rank):
    if rank == 1:
        sys.exit()
    dist.barrier()


@pytest.mark.ranks(2)
def test_raises_what_cannot_be_said(rank):
    class Mute(Exception):
        def __str__(self):
            raise ValueError("no words")

    if rank == 1:
        raise Mute
    dist.barrier()


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("error")
def test_fails_in_a_thread():
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()


def _leave_daemons(record_property):
    told, tell = os.pipe()
    if not os.fork():
        os.setsid()
        if daemon := os.fork():
            os.write(tell, b"%d" % daemon)
            os._exit(0)
        time.sleep(1000)
    record_property("daemon", int(os.read(told, 20)))
    record_property("daemon", subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
    if not (child := os.fork()):
        time.sleep(1000)
    record_property("daemon", child)


@pytest.mark.ranks(2)
def test_leaves_daemons(record_property):
    _leave_daemons(record_property)


@pytest.mark.ranks(2, timeout_s=10)
def test_hangs(rank):
    if rank == 1:
        threading.Event().wait()
    dist.barrier()


@pytest.mark.ranks(2)
def test_captures_by_fixture(capfd, rank):
    os.system(f"echo from {rank}")
    dist.barrier()
    assert capfd.readouterr().out == f"from {rank}\n"


@pytest.mark.ranks(2)
def test_is_captured(caplog, rank):
    logging.getLogger("inner").warning("logged by %d", rank)
    assert caplog.messages == [f"logged by {rank}"]
    print(f"printed by {rank}\n", end="")  # in one piece
    print(f"told by {rank}\n", end="", file=sys.stderr)
    pytest.fail("to be shown")


@pytest.mark.ranks(2)
def test_warns(rank, recwarn, record_property):
    warnings.warn("kept by the fixture", stacklevel=1)
    assert len(recwarn) == 1
    record_property("told", "once")


@pytest.mark.ranks(2)
def test_warns_the_session():
    warnings.warn("on both ranks", stacklevel=1)


@pytest.mark.ranks(2)
def test_has_a_group_already():
    dist.init_process_group("gloo")


@pytest.mark.ranks(2, init=False)
def test_makes_its_own_group():
    dist.init_process_group("gloo")
    dist.barrier()


@pytest.mark.ranks(2)
def test_subtests(subtests, rank):
    for number in range(2):
        with subtests.test(number=number):
            assert number == 0 or rank == 0
