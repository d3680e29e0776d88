"""Fixtures of every test: `run_ranks`, and the check that a test leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from itertools import chain
from pathlib import Path

import hypothesis
import pytest
import torch._dynamo  # noqa: F401 ranks of tests are then forked with it, and need not each import it

import phalanx.testing
from phalanx.launch.spawn import workers
from phalanx.launch.spawn.cleaner import cleaner
from phalanx.launch.warm import starter
from phalanx.record.box import MEMORY_NAME
from phalanx.rendezvous import launched
from phalanx.wire import places as warm_places
from tests import costs, kept, namespaces, shm
from tests import forked as nursery

# The same examples in every run, however long they take; pytest --hypothesis-profile=default draws others.
hypothesis.settings.register_profile(
    "same", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("same")

# Of two MPIs, mpi4py would take the one whose development files are installed, which may be neither's library.
if shutil.which("mpirun.openmpi"):
    os.environ.setdefault("MPI4PY_MPIABI", "openmpi")

_SETTLE_S = 20.0  # what was told to end needs a moment, more so beside another file's tests; a leak stays
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")

# A shell starts its background jobs with these ignored, and so would every process be that a test starts: tests of
# Ctrl-C would wait for ever.
for _sig in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_sig) == signal.SIG_IGN:
        signal.signal(_sig, signal.default_int_handler if _sig == signal.SIGINT else signal.SIG_DFL)


_leave_process = subprocess.Popen.__exit__


def _leave_or_kill(process: subprocess.Popen, kind: type | None, *rest: object) -> None:
    """Leave a ``with`` block; a process that a failed test has left running would be waited for without end."""
    if kind is not None:
        process.kill()
    _leave_process(process, kind, *rest)


subprocess.Popen.__exit__ = _leave_or_kill
_LONG = {"slow": 3600, "cluster": 900, "wheels": 3600, "integrations": 1800}  # limits of their tests, in seconds


@pytest.fixture(scope="session", autouse=True)
def meets_no_strangers():
    """Give launchers of this test process a folder of their own to meet in: they say who else has their cores."""
    folder = tempfile.mkdtemp(prefix="phx-", dir="/tmp")  # short enough for a socket
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", folder)
        phalanx.testing.start_server()  # cold, before any test asks for warm starts: then what it runs is below us
        yield
        for path in warm_places.sockets():
            if path.startswith(folder):
                starter.stop(path)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def warm_jobs():
    """Have all jobs of ``phalanx run`` in a module start warm, for a tenth of what else they cost.

    ``pytestmark = pytest.mark.usefixtures("warm_jobs")``. The process that they are forked from is this session's own.
    Not for what is about the start itself: see `cold_jobs`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_WARM", "1")
        yield


@pytest.fixture(scope="session")
def sympy_plugin(tmp_path_factory):
    """A folder for PYTHONPATH: torch imports sympy by a plugin in it."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "needs_sympy.py").write_text("import sympy\n\ndef load():\n    pass\n")
    (facts := folder / "needs_sympy-1.dist-info").mkdir()
    (facts / "METADATA").write_text("Name: needs_sympy\nVersion: 1\n")
    (facts / "entry_points.txt").write_text("[torch.backends]\nneeds_sympy = needs_sympy:load\n")
    return folder


@pytest.fixture(scope="module")
def warm_hosts(warm_jobs, sympy_plugin):
    """Have the jobs of a module on hosts of namespaces start warm; the process that they are forked from is on none.

    A host ends with all that was started on it. So a job outside comes first, with the number of threads of all others.
    That process has imported sympy, which DTensors would have each rank import for half a second. The folder of the
    plugin is one for the session: with another in PYTHONPATH, each module would have its jobs start a process anew.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", str(sympy_plugin), prepend=os.pathsep)
        job = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "1", "-m", "this"]
        subprocess.run(job, check=True, capture_output=True, timeout=120)
        yield


@pytest.fixture
def cold_jobs(monkeypatch):
    """Have the jobs of one test start cold, in a module with `warm_jobs`."""
    monkeypatch.delenv("PHALANX_WARM")


@pytest.fixture(scope="session")
def forked():
    """``forked.run(script)``, or ``("-c", code)``, or ``("-m", module)``: with torch imported, see `tests.forked`."""
    with contextlib.closing(nursery.Nursery()) as one:
        yield one


_kept: list[kept.KeptRanks] = []


@pytest.fixture(scope="module")
def run_ranks(request):
    """``run_ranks(fn, world_size, *args, timeout_s=60)``, see `phalanx.testing`; with the mark its ranks are kept."""
    if not request.node.get_closest_marker("kept_ranks"):
        yield phalanx.testing.run_ranks
        return
    _kept.append(kept.KeptRanks(_holdings))
    yield _kept[-1].run
    _kept[-1].close()
    _kept.pop()


@pytest.fixture(scope="session")
def run_fresh_ranks():
    """What `run_ranks` is for a module without the mark ``kept_ranks``."""
    return phalanx.testing.run_ranks


@pytest.fixture
def spawn_ranks():
    """``with spawn_ranks(fn, world_size, *args) as ranks:``, see `phalanx.testing`."""
    return phalanx.testing.spawn_ranks


def _process_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200]
    except OSError:
        return "ended"


def _holdings() -> dict[str, set[str]]:
    """Everything that a test could leave behind, as one set of names per kind."""
    reapers, alive_fds = workers.servers.known  # what ranks leave becomes the child of a server
    children = costs.children(os.getpid()) - reapers - {cleaner.pid}
    processes = {child for child in children if "multiprocessing.resource_tracker" not in _process_name(child)}
    for server in chain.from_iterable(map(costs.children, reapers)):
        processes |= costs.children(server)
    descriptors = set()
    for fd in set(os.listdir("/proc/self/fd")).difference(map(str, {*alive_fds, cleaner.fd})):
        try:
            place = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the listing's own
            continue
        if MEMORY_NAME not in place:  # the black box of a training in this process stays as long as it
            descriptors.add(f"{fd} -> {place}")
    threads = {f"{thread.name} ({thread.native_id})" for thread in threading.enumerate()}
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
        except OSError:
            continue
        if name.startswith(("phalanx", "phx")):  # torch keeps pools of its own
            threads.add(f"{name} ({task.name})")
    return {
        "process": {f"{pid} {_process_name(pid)}" for pid in processes},
        "descriptor": descriptors,
        "thread": threads,
        "/dev/shm entry": shm.files(),
    }


def _is_new(process: str, before: set[str], began_s: float) -> bool:
    """Whether a process, as `_holdings` has it, has begun since then, in seconds since the system's boot.

    What was there before may have had another name, if it was about to execute one, or may be missing in `before`: the
    kernel's list of children passes over one while another ends.
    """
    pid = process.split()[0]
    if any(pid == other.split()[0] for other in before):
        return False
    return (launched.start_time(int(pid)) * _TICK_S or math.inf) >= began_s - _TICK_S  # 0: it has ended


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request):
    """Fail a test that leaks a process, a descriptor, a thread or a segment."""
    # Started here, so that the server's own descriptors count as there before. With the variables of `warm_hosts` it
    # would be another server, which costs 4 s of CPU time, and tests on hosts of namespaces start no ranks here.
    if "warm_hosts" not in request.fixturenames:
        phalanx.testing.start_server()
    before, began_s = _holdings(), time.clock_gettime(time.CLOCK_BOOTTIME)
    yield
    deadline, made = time.monotonic() + _SETTLE_S, shm.files() - before["/dev/shm entry"]
    while True:
        after = {kind: names.difference(*(ranks.held(kind) for ranks in _kept)) for kind, names in _holdings().items()}
        after["/dev/shm entry"] = shm.unmapped(after["/dev/shm entry"] & made)  # what comes later is other jobs'
        after["process"] = {name for name in after["process"] if _is_new(name, before["process"], began_s)}
        left = {kind: after[kind] - before[kind] for kind in after if after[kind] - before[kind]}
        if not left:
            return
        if time.monotonic() > deadline:
            pytest.fail(f"the test left behind: {left}")
        time.sleep(0.02)


@pytest.fixture(scope="session")
def needs_hosts():
    """Skip where hosts can't be made of namespaces."""
    if why_not := namespaces.why_no_hosts():
        pytest.skip(f"no hosts here: {why_not}")


_MARKED = {
    "integrations": ("tests/libraries/",),
    "wheels": ("tests/platforms/test_wheels.py",),
    "cluster": (
        "tests/clusters/",
        "tests/hosts/test_chaos.py",
        "tests/hosts/test_cuts.py",
        "tests/hosts/test_mpi.py",
        "tests/hosts/test_real_hosts.py",
        "tests/doctor/test_meeting.py",
    ),
    "slow": (
        "tests/bench/",
        "tests/docs/test_pages.py::test_the_code_of_a_page_does_what_the_page_says[guides/",
        "tests/docs/test_pages.py::test_the_code_of_a_page_does_what_the_page_says[tutorials/",
        "tests/examples/test_scripts.py",
        "tests/launch/test_warm_ends.py",
        "tests/launch/test_warm_spawn.py",
        "tests/launch/test_warm_stuck.py",
        "tests/conformance/test_harness.py",
        "tests/core/test_core_build.py",
        "tests/core/test_model.py",
        "tests/replace/test_exam.py",
        "tests/stress/",
    ),
}


def pytest_configure(config):
    config.pluginmanager.register(costs.Costs())


def pytest_collection_finish():
    gc.freeze()  # a test that collects garbage would else look through all of torch, for a quarter of a second


def pytest_sessionfinish():
    gc.unfreeze()  # or libraries would say at exit that it was leaked


def pytest_collection_modifyitems(items):
    for item in items:
        for marker, places in _MARKED.items():
            if item.nodeid.startswith(places):
                item.add_marker(marker)
        for marker, limit_s in _LONG.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.timeout(limit_s))
