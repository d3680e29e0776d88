"""``pytest --fast-ranks``: what tests start by spawn is forked, and nothing but the time tells."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import random
import resource
import select
import signal
import subprocess
import sys
import textwrap

import numpy
import pytest
import torch
import torch.multiprocessing as mp

from phalanx.testing import fast_ranks

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks from a server on Linux alone")
_LIMIT_S = 120
_SELDOM_IMPORTED = ("ptyprocess", "snowballstemmer", "imagesize", "alabaster", "roman_numerals")


def describe_process():
    """Return what a process has from its parent, whichever way it was started."""
    process = multiprocessing.current_process()
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "path": sys.path,
        "argv": sys.argv,
        "umask": os.umask(0),
        "ignored": {one for one in signal.valid_signals() if signal.getsignal(one) is signal.SIG_IGN},
        "on SIGINT": str(signal.getsignal(signal.SIGINT)),
        "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "group": os.getpgrp(),
        "session": os.getsid(0),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "CPUs": os.sched_getaffinity(0),
        "threads": torch.get_num_threads(),
        "flags": tuple(sys.flags),
        "main": sys.modules["__main__"].__name__,
        "daemon": process.daemon,
        "parent": multiprocessing.parent_process().pid,
        "method": multiprocessing.get_start_method(),
        "patched": hasattr(torch, "patched_by_a_test"),
    }


def send(pipe, fn, *args):
    pipe.send(fn(*args))


def answer_of(fn, *args, method="spawn"):
    """Return what a function returns in a process of its own."""
    context = mp.get_context(method)
    ours, theirs = context.Pipe(duplex=False)
    with ours:
        process = context.Process(target=send, args=(theirs, fn, *args))
        process.start()
        theirs.close()  # so that its end is an end of the file
        answer = ours.recv()
    process.join(_LIMIT_S)
    assert process.exitcode == 0
    process.close()
    return answer


@pytest.fixture(scope="module")
def spawned_before():
    """What a process is like that is spawned without the option, from a test process in an unusual state."""
    return {}


@pytest.fixture(scope="module", autouse=True)
def fast(spawned_before):
    with pytest.MonkeyPatch.context() as patch, unusual_state(patch):
        spawned_before.update(answer_of(describe_process))
    fast_ranks.begin()
    answer_of(os.getpid)  # its server's descriptors count as there before a test
    yield
    assert fast_ranks.end() == []


class unusual_state:
    """A test process that differs from what its server was started under in all that a child inherits."""

    def __init__(self, patch):
        self._patch = patch

    def __enter__(self):
        self._patch.setenv("GIVEN_BY_A_TEST", "1")
        self._patch.chdir("/")
        self._patch.syspath_prepend("/nowhere")
        self._patch.setattr(sys, "argv", ["a test", "--flag"])
        self._patch.setattr(torch, "patched_by_a_test", True, raising=False)
        self._umask = os.umask(0o027)
        self._handler = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        self._blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        self._limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (self._limits[0] - 1, self._limits[1]))

    def __exit__(self, *_):
        os.umask(self._umask)
        signal.signal(signal.SIGUSR2, self._handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)
        resource.setrlimit(resource.RLIMIT_NOFILE, self._limits)


def test_a_process_is_as_a_spawned_one_would_be(monkeypatch, spawned_before):
    with unusual_state(monkeypatch):
        forked = answer_of(describe_process)
    for facts in (forked, spawned_before):
        for name in ("PYTEST_CURRENT_TEST", "COLUMNS", "LINES"):  # the last are readline's, which Python does not see
            facts["environment"].pop(name, None)
    changed = set(forked.pop("environment").items()) ^ set(spawned_before.pop("environment").items())
    assert (changed, forked) == (set(), spawned_before)
    assert not forked["patched"]


def has_begun_with(names):
    return [name for name in names if name in began_with]


began_with = set(sys.modules)  # when this module was imported: in a child, before its function runs


def test_what_the_test_process_has_imported_is_there_from_the_start():
    assert answer_of(os.getppid) != os.getpid()
    assert answer_of(has_begun_with, ["torch._dynamo", "hypothesis"]) == ["torch._dynamo", "hypothesis"]


def test_what_a_process_imports_the_next_one_has_from_the_start():
    name = next(name for name in _SELDOM_IMPORTED if name not in sys.modules and not answer_of(has_begun_with, [name]))
    answer_of(import_one, name)
    assert answer_of(has_begun_with, [name]) == [name]


def import_one(name):
    return __import__(name).__name__


def leave(how):
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        raise ValueError("on purpose")
    if how == "exit":
        sys.exit(3)
    if how == "hang":
        signal.pause()
    os._exit(4)


@pytest.mark.parametrize(("how", "code"), [("kill", -9), ("raise", 1), ("exit", 3), ("_exit", 4), ("hang", -15)])
def test_the_end_of_a_process_is_told_as_ever(capfd, how, code):
    process = mp.get_context("spawn").Process(target=leave, args=(how,), daemon=True)
    process.start()
    assert process in mp.active_children()
    if how == "hang":
        assert process.exitcode is None
        process.terminate()
    assert multiprocessing.connection.wait([process.sentinel], _LIMIT_S)
    process.join(_LIMIT_S)
    assert (process.exitcode, process.is_alive()) == (code, False)
    process.close()
    assert ("ValueError: on purpose" in capfd.readouterr().err) == (how == "raise")


def say_at_end(word):
    print(word, flush=True)
    atexit.register(print, f"the end of {word}")


def test_each_process_writes_where_the_test_process_does_at_the_time(capfd):
    for word in ("one", "two"):
        answer_of(say_at_end, word)
        assert capfd.readouterr().out == f"{word}\nthe end of {word}\n"


def draw():
    return random.random(), float(numpy.random.random()), float(torch.rand(1))


def test_processes_draw_other_numbers_than_each_other():
    assert not set(answer_of(draw)) & set(answer_of(draw))


def add_one(rank, tensor, lock):
    with lock:
        tensor += rank + 1


def test_tensors_and_locks_are_shared():
    tensor = torch.zeros(2).share_memory_()
    mp.spawn(add_one, (tensor, mp.get_context("spawn").Lock()), nprocs=3)
    assert tensor.tolist() == [6, 6]


def test_the_error_of_a_spawned_function_comes_back():
    with pytest.raises(mp.ProcessRaisedException, match="ValueError: on purpose"):
        mp.spawn(raise_in, nprocs=2)


def raise_in(rank):
    raise ValueError("on purpose")


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_pool_computes(method):
    with mp.get_context(method).Pool(2) as pool:
        assert pool.map(abs, range(-4, 0)) == [4, 3, 2, 1]
        assert os.getpid() not in pool.map(parent_of, range(2))
        pool.close()
        pool.join()


def parent_of(_):
    return os.getppid()


def test_a_process_starts_processes_of_its_own():
    assert answer_of(nested) == 5


def nested():
    return answer_of(abs, -5)


@pytest.fixture
def servers(monkeypatch, tmp_path):
    """Servers that import no package but those of `tmp_path`, which are quick."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(fast_ranks, "installed_modules", lambda besides: [path.stem for path in tmp_path.glob("*.py")])
    servers = fast_ranks._Servers()
    yield servers
    servers.close()


def test_a_package_that_reads_the_environment_has_a_server_for_each_value(servers, monkeypatch, tmp_path):
    tmp_path.joinpath("reads_flavor.py").write_text("import os\nflavor = os.environ.get('FLAVOR')\n")
    monkeypatch.setenv("FLAVOR", "sweet")
    sweet = servers.find()
    monkeypatch.setenv("ANOTHER", "1")
    assert servers.find() is sweet
    monkeypatch.setenv("FLAVOR", "sour")
    sour = servers.find()
    assert sour is not sweet
    monkeypatch.setenv("FLAVOR", "sweet")
    assert servers.find() is sweet
    assert not servers.notes


def test_servers_of_several_environments_are_kept(servers, monkeypatch):
    def find_all():
        for flags in ("0", "1", "2", "3"):
            monkeypatch.setenv("MALLOC_PERTURB_", flags)
            yield servers.find()

    first = list(find_all())
    assert len(set(first)) == 4
    assert list(find_all()) == first


def test_modules_that_read_what_each_test_changes_are_imported_by_each_process(servers, monkeypatch, tmp_path):
    tmp_path.joinpath("reads_folder.py").write_text("import os\nfolder = os.environ['FOLDER']\n")
    tmp_path.joinpath("imports_it.py").write_text("import reads_folder\n")
    tmp_path.joinpath("harmless.py").write_text("")
    found = []
    for number in range(6):
        monkeypatch.setenv("FOLDER", str(number))
        found.append(servers.find())
    assert len({*found[:2], found[-1]}) == 3
    assert set(found[3:]) == {found[3]}  # the third imports what imports it, if it has not seen that the second does
    assert found[3]._asked == {"harmless"}
    assert next(iter(servers.notes)).startswith("FOLDER keeps changing, so each process imports ")


def test_a_package_that_starts_a_thread_is_left_out_and_named(servers, tmp_path):
    tmp_path.joinpath("harmless.py").write_text("")
    tmp_path.joinpath("starts_thread.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    assert servers.find().lives
    (line,) = servers.notes
    assert line.startswith("starts_thread starts a thread when it is imported")


def test_where_a_package_opens_a_gpu_at_its_import_processes_are_new_and_that_is_found_out_once(servers, tmp_path):
    tmp_path.joinpath("opens_device.py").write_text(
        "from phalanx.testing import fast_server\nfast_server._DEVICES = '/dev/full'\nfile = open('/dev/full', 'w')\n"
    )
    for _ in range(2):
        with pytest.raises(fast_ranks._Stays, match="a package talks to the GPU when it is imported"):
            servers.find()
    assert servers._num_starts == 1


def test_where_coverage_is_measured_processes_are_new_and_a_line_says_so(servers, monkeypatch):
    monkeypatch.setenv("COVERAGE_PROCESS_START", "setup.cfg")
    with pytest.raises(fast_ranks._Stays, match="coverage"):
        servers.find()


def test_a_server_that_was_killed_is_replaced(servers):
    first = servers.find()
    os.kill(first._forks._forkserver_pid, signal.SIGKILL)
    os.waitid(os.P_PID, first._forks._forkserver_pid, os.WEXITED | os.WNOWAIT)
    second = servers.find()
    assert (first.lives, second.lives) == (False, True)


def test_a_process_starts_as_ever_where_the_server_has_ended_unseen(servers, monkeypatch):
    def refuse(forks, fds):
        raise ConnectionRefusedError

    monkeypatch.setattr(fast_ranks, "_servers", servers)
    monkeypatch.setattr("multiprocessing.forkserver.ForkServer.connect_to_new_process", refuse)
    process = mp.get_context("spawn").Process(target=os._exit, args=(4,))
    process.start()
    process.join(_LIMIT_S)
    assert process.exitcode == 4
    process.close()
    (note,) = servers.notes
    assert "has ended" in note


_ABANDONED = """
import multiprocessing, signal, sys
from phalanx.testing import fast_ranks

if __name__ == "__main__":
    fast_ranks.begin()
    process = multiprocessing.get_context("spawn").Process(target=signal.pause)
    process.start()
    print(process.pid, flush=True)
    signal.pause()
"""


def test_processes_end_with_the_test_process(tmp_path):
    script = tmp_path / "abandons.py"
    script.write_text(_ABANDONED)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        child = os.pidfd_open(int(parent.stdout.readline()))
        try:
            parent.kill()
            assert select.select([child], [], [], _LIMIT_S)[0]
        finally:
            os.close(child)


_SUITE = """
import os, unittest

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.testing._internal.common_distributed import MultiProcessTestCase, MultiThreadedTestCase


class ProcessesTest(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def _total(self):
        dist.init_process_group("gloo", store=dist.FileStore(self.file_name, 2), rank=self.rank, world_size=2)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return tensor.item()

    def test_passes(self):
        self.assertEqual(self._total(), 2)

    def test_fails(self):
        self.assertEqual(self._total(), 3)

    def test_is_skipped(self):
        raise unittest.SkipTest("on purpose")


class ThreadsTest(MultiThreadedTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def test_passes(self):
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        self.assertEqual(tensor.item(), 2)


def is_fork(rank, results):
    results[rank] = os.getppid()


def test_spawn():
    results = torch.zeros(2, dtype=torch.long).share_memory_()
    mp.spawn(is_fork, (results,), nprocs=2)
    assert os.getpid() not in results.tolist()
"""


def test_harnesses_of_torch_run_unchanged(forked, tmp_path):
    tmp_path.joinpath("test_suite.py").write_text(_SUITE)
    tmp_path.joinpath("pytest.ini").write_text("[pytest]\n")
    flags = ["-q", "-rA", "--tb=line", "-p", "no:cacheprovider", "--fast-ranks"]
    done = forked.run("-m", "pytest", *flags, cwd=tmp_path, timeout=_LIMIT_S * 2)
    assert done.returncode == 1, done.stdout + done.stderr
    told = [line.partition(" - ")[0] for line in done.stdout.splitlines() if line.startswith(("PASSED", "FAILED"))]
    assert sorted(told) == [
        "FAILED test_suite.py::ProcessesTest::test_fails",
        "PASSED test_suite.py::ProcessesTest::test_passes",
        "PASSED test_suite.py::ThreadsTest::test_passes",
        "PASSED test_suite.py::test_spawn",
    ]
    assert "1 failed, 3 passed, 1 skipped" in done.stdout, textwrap.indent(done.stdout, "  ")
    assert "phalanx: --fast-ranks" not in done.stdout
