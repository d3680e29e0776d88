"""A rank forked from the preloaded process finds what ``python script.py`` would have given it.

Of what `test_warm` shows to be the same cold and warm, one case is cold here, and the others are forked from a process
that other tests have left, without an import of torch for each.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("warm_jobs")

LIMIT_S = 60

# What a script can see of how it was started.
FACTS = """
import atexit, inspect, json, os, signal, sys, threading, traceback
print("FACTS " + json.dumps({
    "name": __name__,
    "file": __file__,
    "spec": getattr(__spec__, "name", None),
    "package": __package__,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "globals": sorted(name for name in globals() if name.startswith("__")),
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "path": sys.path,
    "flags": repr(sys.flags),
    "depth": len(inspect.stack()),
    "stack": traceback.format_stack(),
    "threads": threading.active_count(),
    "main_thread": threading.current_thread() is threading.main_thread(),
    "sigint": repr(signal.getsignal(signal.SIGINT)) == repr(signal.default_int_handler),
    "sigchld": repr(signal.getsignal(signal.SIGCHLD)),
    "sigtttin": repr(signal.getsignal(signal.SIGTTIN)),
    "mask": repr(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "cwd": os.getcwd(),
    "pythonpath": os.environ.get("PYTHONPATH"),
    "launch_variables": sorted(k for k in os.environ if k.startswith("PHALANX_FORKER")),
    "sitecustomize": "sitecustomize" in sys.modules,
    "excepthook": sys.excepthook is sys.__excepthook__,
    "streams": [s.encoding + s.errors + str(s.write_through) for s in (sys.stdin, sys.stdout, sys.stderr)],
    "descriptors": sorted(int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) > 2)[:-1],
    "modules": [name for name in ("torch", "torch.nn", "numpy", "phalanx") if name in sys.modules],
    "preloaded": "libtorch" in open("/proc/self/maps").read(),
}))
"""


def phalanx_run(*args, num_ranks=1, **options):
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", str(num_ranks), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, **options)


def facts(stdout):
    return [json.loads(line.split("FACTS ", 1)[1]) for line in stdout.splitlines() if "FACTS " in line]


@pytest.fixture
def script(tmp_path, monkeypatch):
    """``script(source)`` writes it to ``script.py`` in the working directory, which is the test's own."""
    monkeypatch.chdir(tmp_path)

    def write(source, name="script.py"):
        (tmp_path / name).write_text(textwrap.dedent(source))
        return name

    return write


def compare(run_args, **options):
    environ = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **options.pop("env", {})}
    alone = subprocess.run(
        [sys.executable, *run_args],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environ,
        stdin=subprocess.DEVNULL,
    )
    ours = phalanx_run(*run_args, env=environ, stdin=subprocess.DEVNULL, **options)
    assert alone.returncode == ours.returncode == 0, ours.stderr
    (want,), (got,) = facts(alone.stdout), facts(ours.stdout)
    assert got.pop("preloaded")
    assert not want.pop("preloaded")
    assert got == want


def test_a_script_sees_what_it_would_see_alone(cold_jobs, script):
    compare([script(FACTS), "--flag", "a b", ""])


def test_a_module_sees_what_it_would_see_alone(script, tmp_path):
    (tmp_path / "pkg").mkdir()
    script("", "pkg/__init__.py")
    script(FACTS, "pkg/train.py")
    compare(["-m", "pkg.train", "x"])


def test_a_folder_and_a_zip_file_run_as_programs(script, tmp_path):
    (tmp_path / "app").mkdir()
    script(FACTS, "app/__main__.py")
    compare(["app", "x"])
    with zipfile.ZipFile("app.zip", "w") as archive:
        archive.write("app/__main__.py", "__main__.py")
    compare(["app.zip", "x"])


def test_the_users_own_path_and_sitecustomize_are_kept(cold_jobs, script, tmp_path):
    (tmp_path / "site").mkdir()
    script("import builtins; builtins.from_site = 'yes'", "site/sitecustomize.py")
    name = script("print(from_site)\n" + FACTS)
    compare([name], env={"PYTHONPATH": str(tmp_path / "site")})


def test_a_traceback_shows_the_script_alone(script):
    name = script("def step():\n    raise ValueError('bad')\nstep()\n")
    alone = subprocess.run([sys.executable, name], capture_output=True, text=True, timeout=LIMIT_S)
    ours = phalanx_run(name)
    (log,) = Path("logs").glob("script/*/attempt_0/rank_0/stderr.log")
    assert log.read_text() == alone.stderr
    assert "frames of" not in ours.stderr  # there is nothing to fold
    assert ours.returncode == alone.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('words')", 1),
        ("raise SystemExit", 0),
        ("import os; os._exit(4)", 4),
        ("raise KeyboardInterrupt", 128 + signal.SIGINT),
        ("import atexit, os; atexit.register(lambda: print('bye'))", 0),
        ("def f(:", 1),
    ],
)
def test_every_way_to_end_ends_as_it_would_alone(script, source, code):
    name = script(source)
    alone = subprocess.run([sys.executable, name], capture_output=True, text=True, timeout=LIMIT_S)
    ours = phalanx_run(name)
    assert ours.returncode == code == (alone.returncode if alone.returncode >= 0 else 128 - alone.returncode)
    assert [line.removeprefix("[rank 0] ") for line in ours.stdout.splitlines()] == alone.stdout.splitlines()


def test_random_numbers_differ_between_ranks_as_between_processes(script):
    source = """
    import random, uuid, numpy, torch
    print(random.random(), numpy.random.rand(), uuid.uuid4())
    print("torch", torch.initial_seed())
    """
    out = phalanx_run(script(source), num_ranks=2).stdout.splitlines()
    first, second = (line.split()[2:] for line in out if "torch" not in line)
    assert not set(first) & set(second)
    assert len({line.split()[-1] for line in out if "torch" in line}) == 2


@pytest.mark.slow
def test_worker_processes_of_every_start_method_find_the_script(script):
    source = """
    import multiprocessing, os, torch

    class Squares(torch.utils.data.Dataset):
        def __len__(self):
            return 4
        def __getitem__(self, index):
            return index**2

    def worker(queue):
        queue.put((__name__, os.environ["RANK"], os.getppid()))

    if __name__ == "__main__":
        for method in ("fork", "spawn", "forkserver"):
            context = multiprocessing.get_context(method)
            queue = context.Queue()
            process = context.Process(target=worker, args=(queue,))
            process.start()
            name, rank, parent = queue.get(timeout=30)
            process.join()
            print(method, name, rank, process.exitcode, parent == os.getpid() or method == "forkserver")
            loader = torch.utils.data.DataLoader(Squares(), num_workers=1, multiprocessing_context=method)
            print([int(x) for x in loader])
    """
    done = phalanx_run(script(source))
    assert done.returncode == 0, done.stderr
    said = [line.removeprefix("[rank 0] ") for line in done.stdout.splitlines()]
    assert said == [
        line
        for method, name in (("fork", "__main__"), ("spawn", "__mp_main__"), ("forkserver", "__mp_main__"))
        for line in (f"{method} {name} 0 0 True", "[0, 1, 4, 9]")
    ]


def test_threads_pools_and_devices_start_in_the_rank(script):
    source = """
    import os, torch
    assert not torch.cuda.is_initialized()
    before = len(os.listdir("/proc/self/task"))
    torch.set_num_threads(3)
    (torch.rand(300, 300) @ torch.rand(300, 300)).sum()
    torch.rand(1_000_000).exp().sum()
    print(before, len(os.listdir("/proc/self/task")) > before)
    """
    assert phalanx_run(script(source)).stdout == "[rank 0] 1 True\n"


def test_a_broken_torch_is_met_by_the_script_itself(cold_jobs, script, tmp_path):
    (tmp_path / "broken").mkdir()
    script("raise ImportError('no torch today')", "broken/torch.py")
    name = script("print('before')\nimport torch\n")
    done = phalanx_run(name, env={**os.environ, "PYTHONPATH": str(tmp_path / "broken")})
    assert done.returncode == 1
    assert done.stdout == "[rank 0] before\n"
    assert "\n  ImportError: no torch today\n" in done.stderr


def test_a_rank_starts_anew_where_a_thread_came_up_before_the_fork(cold_jobs, script, tmp_path):
    (tmp_path / "early").mkdir()
    script(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\nMARK = 'early'\n",
        "early/torch.py",
    )
    name = script("import sys, threading\nprint('torch' in sys.modules, threading.active_count(), sys.argv[1:])\n")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "early")}
    done = phalanx_run("--no-use-env", name, "a", env=environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[rank 0] False 1 ['--local-rank=0', 'a']\n"


def test_what_a_script_holds_is_finalised_at_its_end(script):
    name = script(
        """
        class Holder:
            def __del__(self): print("closed")
        holder = Holder()
        def function(): pass
        """
    )
    assert phalanx_run(name).stdout == "[rank 0] closed\n"


def test_a_module_of_the_script_wins_over_a_namesake_that_torch_needs(cold_jobs, script):
    script("NAME = 'mine'\n", "json.py")
    name = script("import json\nprint(json.NAME)\n")
    done = phalanx_run(name)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[rank 0] mine\n"


def test_without_preload_the_interpreter_starts_anew(cold_jobs, script):
    done = phalanx_run("--no-preload", script(FACTS))
    assert done.returncode == 0, done.stderr
    assert not facts(done.stdout)[0]["preloaded"]


def test_a_local_rank_argument_is_given_on_request(script):
    name = script("import sys; print(sys.argv[1:])")
    for flags in (["--no-use-env"], ["--no-use-env", "--no-preload"]):
        out = phalanx_run(*flags, name, "--lr", "1", num_ranks=2).stdout.splitlines()
        assert sorted(out) == [f"[rank {n}] ['--local-rank={n}', '--lr', '1']" for n in range(2)]
