"""phalanx.spawn and run_ranks from a warm process: the same ranks, and nothing left when the script goes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from itertools import chain

import pytest

from tests.launch.jobs import LIMIT_S
from tests.launch.test_orphans import WITH_CHILDREN, ends, parent_of
from tests.launch.warm_jobs import servers

SEEN = """
import json, os, sys
import phalanx

def see(rank, *_):
    import signal, torch
    names = {"PHALANX_LAUNCH", "PHALANX_PROCESS", "PHALANX_RECORD", "PHALANX_WARM"}
    names |= {"MASTER_PORT", "TORCHELASTIC_ERROR_FILE"}
    return {
        "rank": rank,
        "modules": sorted(sys.modules),
        "argv": [sys.argv, sys.orig_argv[1:], sys.path],
        "environment": {k: v for k, v in os.environ.items() if k not in names},
        "folder": os.getcwd(),
        "umask": os.umask(0o22),
        "threads": torch.get_num_threads(),
        "handlers": {int(s): repr(signal.getsignal(s)) for s in signal.valid_signals()},
        "mask": repr(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "own_group": os.getpgid(0) == os.getpid(),
        "command_line": open("/proc/self/cmdline").read().split("main(")[0],
    }
"""
SPAWN = (
    SEEN
    + """
if __name__ == "__main__":
    for _ in range(2):
        print(json.dumps(phalanx.spawn(see, nprocs=2, **json.loads(sys.argv[1]))))
"""
)
RUN_RANKS = """
import os
from phalanx.testing import run_ranks
from seen import see

if __name__ == "__main__":
    print(len(run_ranks(see, 2, **({"warm": True} if "PHALANX_WARM" not in os.environ else {}))))
"""


def python(*args, **options):
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=LIMIT_S, **options)


def results(done):
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_spawned_ranks_see_the_same_cold_and_warm(warm):
    warm.write(SPAWN)
    cold = results(python("train.py", "{}"))
    assert servers() == []
    for number in range(2):
        ours = results(python("train.py", '{"warm": true}'))
        for want, got in zip(chain(*cold), chain(*ours), strict=True):
            want["argv"][0][1] = got["argv"][0][1]  # our own argument
            assert got == want, number
    assert len(servers()) == 1


@pytest.mark.slow
def test_each_fork_server_draws_numbers_of_its_own(warm):
    warm.write("""
        import torch, phalanx

        def draw(rank):
            return torch.initial_seed(), torch.rand(1).item()

        if __name__ == "__main__":
            print(*phalanx.spawn(draw, nprocs=1, warm=True)[0])
    """)
    draws = [python("train.py").stdout.split() for _ in range(3)]
    assert [len(set(several)) for several in zip(*draws, strict=True)] == [3, 3]
    assert len(servers()) == 1


@pytest.mark.parametrize("environ", [{}, {"PHALANX_WARM": "1"}], ids=["argument", "variable"])
def test_ranks_of_tests_start_warm(warm, environ):
    warm.write(SEEN, "seen.py")
    warm.write(RUN_RANKS)
    done = python("train.py", env={**os.environ, **environ})
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")
    assert len(servers()) == 1


@pytest.mark.slow
def test_an_interpreter_with_options_of_its_own_starts_cold(warm):
    warm.write(SPAWN)
    for options in (["-W", "error::BytesWarning"], ["-O"]):
        done = python(*options, "train.py", '{"warm": true}')
        assert done.returncode == 0
        assert done.stderr == "phalanx: no warm start: this interpreter was started with options of its own\n"
        assert servers() == []
    done = python("train.py", '{"warm": true}', env={**os.environ, "PYTHONOPTIMIZE": "1"})
    assert (done.returncode, done.stderr) == (0, "")
    assert len(servers()) == 1


@pytest.mark.parametrize("victim", ["script", "stand-in", "server"])
def test_nothing_that_spawned_ranks_have_started_outlives_the_script(warm, victim):
    source = f"""
import os, signal, phalanx

def wait(rank):
{"".join("    " + line for line in WITH_CHILDREN.splitlines(keepends=True))}

if __name__ == "__main__":
    phalanx.spawn(wait, nprocs=1, warm=True)
"""
    warm.write(source)
    with subprocess.Popen([sys.executable, "train.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as script:
        server, *pids = map(int, script.stdout.readline().split()[1:])
        reaper = parent_of(server)
        guard = parent_of(reaper)
        assert [parent_of(guard)] == servers()
        with open(f"/proc/{script.pid}/task/{script.pid}/children") as f:
            (stand_in,) = [pid for pid in map(int, f.read().split()) if "forkserver" in _command_line(pid)]
        os.kill({"script": script.pid, "stand-in": stand_in, "server": server}[victim], signal.SIGKILL)
        assert [pid for pid in (server, reaper, guard, stand_in, *pids) if not ends(pid)] == []
        script.kill()
    assert len(servers()) == 1


def _command_line(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline") as file:
        return file.read()
    return ""
