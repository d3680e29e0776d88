"""Run by tests/test_plugin.py in a pytest of its own: marks with nonsense, and what can't be forked."""

import asyncio
import os

import pytest
import torch
import torch.distributed as dist

from phalanx.testing.plugin import limits


@pytest.mark.ranks
def test_no_size():
    pass


@pytest.mark.ranks(0)
def test_zero():
    pass


@pytest.mark.ranks("two")
def test_words():
    pass


@pytest.mark.ranks(True)
def test_true():
    pass


@pytest.mark.ranks(2, 2.5)
def test_fraction():
    pass


@pytest.mark.ranks(2, backnd="gloo")
def test_unknown_option():
    pass


@pytest.mark.ranks(2, start_method="spawn")
def test_start_method():
    pass


@pytest.mark.ranks(2, hosts=[1, 2])
def test_hosts_that_do_not_add_up():
    pass


@pytest.mark.ranks(2, hosts="11")
def test_hosts_in_words():
    pass


@pytest.mark.ranks(2, timeout_s=0)
def test_no_time():
    pass


@pytest.mark.ranks(2, group_timeout_s="long")
def test_timeout_in_words():
    pass


@pytest.mark.ranks(2, env={"A": 1})
def test_environment_of_numbers():
    pass


@pytest.mark.ranks(2, env={"A=B": "1"})
def test_environment_without_a_name():
    pass


@pytest.mark.ranks(2, backend=7)
def test_backend_number():
    pass


@pytest.mark.ranks(2, init="no")
def test_init_in_words():
    pass


@pytest.mark.ranks(2, init_method=7)
def test_init_method_number():
    pass


@pytest.mark.ranks(100_000_000)
def test_too_many():
    pass


@pytest.mark.ranks(2, init=False)
def test_group_without_one(group):
    pass


def test_rank_without_mark(rank):
    pass


def test_world_size_without_mark(world_size):
    pass


@pytest.fixture
def asks_late(request):
    return request.getfixturevalue("rank")


@pytest.mark.ranks(2)
def test_asks_late(asks_late):
    pass


@pytest.fixture
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.mark.ranks(2)
def test_shares_a_loop(loop):
    pass


@pytest.fixture
def default_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_group_of_the_parent(default_group):
    pass


@pytest.fixture
def gpu_in_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)


@pytest.mark.ranks(2)
def test_gpu_of_the_parent(gpu_in_use):
    pass


@pytest.mark.ranks(2)
def test_gpu_was_asked_for_before_the_fork(monkeypatch):
    assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"  # in this module, which asks for ranks
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    torch.cuda.init()


@pytest.fixture
def no_processes(monkeypatch):
    def refuse():
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("os.fork", refuse)


@pytest.mark.ranks(2)
def test_no_more_processes(no_processes):
    pass


@pytest.fixture
def no_memory(monkeypatch):
    monkeypatch.setattr(limits, "_RANK_BYTES", 2**60)


@pytest.mark.ranks(2)
def test_no_memory(no_memory):
    pass
