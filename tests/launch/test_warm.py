"""Jobs that are forked from a process that has torch imported: as if it had been imported anew, and never wrong."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.jobs import LIMIT_S, PHALANX_RUN
from tests.launch.test_orphans import ends
from tests.launch.test_preload import FACTS
from tests.launch.warm_jobs import HELLO, servers, sockets
from tests.namespaces import hosts

MORE_FACTS = """
import gc, resource, warnings
_modules = sorted(sys.modules)
import torch, phalanx.launch
_STATUS = ("Name", "Umask", "SigBlk", "SigIgn", "SigCgt", "Groups", "NoNewPrivs", "Threads", "Uid", "Cpus_allowed_list")
print("FACTS " + json.dumps({
    "modules": _modules,
    "environment": {k: v for k, v in os.environ.items() if k not in (
        "PHALANX_COMMAND", "PHALANX_LAUNCH", "PHALANX_PROCESS", "PHALANX_PROMPTS", "PHALANX_RECORD",
        "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID", "MASTER_PORT")},
    "limits": {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT")},
    "nice": os.nice(0),
    "oom": open("/proc/self/oom_score_adj").read(),
    "cgroup": open("/proc/self/cgroup").read(),
    "umask": os.umask(0o22),
    "command_line": open("/proc/self/cmdline").read(),
    "comm": open("/proc/self/comm").read(),
    "exe": os.readlink("/proc/self/exe"),
    "handlers": {int(s): repr(signal.getsignal(s)).partition(" at 0x")[0] for s in signal.valid_signals()},
    "status": [line for line in open("/proc/self/status") if line.split(":")[0] in _STATUS],
    "own_session": os.getsid(0) == os.getpid() == os.getpgid(0),
    "finders": [repr(f).split(" at ")[0] for f in (sys.displayhook, sys.unraisablehook, *sys.meta_path)],
    "importers": sorted(sys.path_importer_cache),
    "packages": [sorted(vars(package)) for package in (phalanx, phalanx.launch)],
    "seekable": [s.seekable() for s in (sys.stdin, sys.stdout, sys.stderr)],
    "read": sys.stdin.read(),
    "extra": [os.read(9, 100).decode() if os.path.exists("/proc/self/fd/9") else None],
    "gc": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 0],
    "interpreter": [len(warnings.filters), sys.getrecursionlimit(), sys.getswitchinterval(), sys._xoptions],
    "at_exit": atexit._ncallbacks(),
    "threads_of_torch": torch.get_num_threads(),
}))
"""


def facts(done):
    assert done.returncode == 0, done.stderr
    assert "no warm start" not in done.stderr
    found = {}
    for line in done.stdout.splitlines():
        if "FACTS " in line:
            found |= json.loads(line.split("FACTS ", 1)[1])
    return found


ARGUMENTS = [["./pkg/../train.py", "--flag", "a b", ""], ["-m", "pkg.train", "x"], ["pkg"]]


def test_a_script_sees_the_same_cold_and_warm(warm):
    for name in ("train.py", "pkg/train.py", "pkg/__main__.py"):
        warm.write(FACTS + MORE_FACTS, name)
    warm.write("", "pkg/__init__.py")
    (warm.folder / "given").write_text("from outside")
    for number, args in enumerate(ARGUMENTS):
        seen = []
        # Cold, in the job that starts a warm process, and in one that finds it.
        for flags in ([], ["--warm"], ["--warm"])[: 3 if number == 0 else 2]:
            command = ["sh", "-c", 'exec "$@" 9< given', "sh", *PHALANX_RUN, "--nproc-per-node", "1", *flags, *args]
            given = {"input": "typed", "capture_output": True, "text": True, "timeout": LIMIT_S}
            seen.append(facts(subprocess.run(command, umask=0o27, **given)))
        cold = seen[0]
        assert cold["preloaded"]
        assert cold["extra"] == ["from outside"]
        assert seen == [cold] * len(seen), args
    assert len(servers()) == 1


# The next two are the first in this module of those that share a folder, in which there is no process yet.


def last_line_of_dry_run(warm, *flags, **options):
    return warm(HELLO, "--dry-run", *flags, **options).stdout.splitlines()[-1]


def test_a_dry_run_says_that_it_would_start_a_process_and_starts_none(kept_warm):
    assert last_line_of_dry_run(kept_warm) == "phalanx run: starts a warm process first"
    assert servers() == []


def test_two_at_once_start_one_process(kept_warm):
    assert servers() == []
    commands = [kept_warm.command(HELLO) for _ in range(2)]
    jobs = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for command in commands
    ]
    assert [job.communicate(timeout=LIMIT_S)[0] for job in jobs] == ["[rank 0] hello 0\n"] * 2
    assert len(servers()) == 1


def jobs_of(warm):
    """Return how many jobs the one warm process has had, by its pid."""
    head, (pid, jobs, *_) = map(str.split, warm.phalanx("warm", "--list").stdout.splitlines())
    assert head[:2] == ["pid", "jobs"]
    return {int(pid): int(jobs)}


def test_the_next_job_is_forked_from_the_process_that_the_first_has_left(kept_warm):
    first = kept_warm(HELLO)
    (pid,) = servers()
    before = jobs_of(kept_warm)
    second = kept_warm(HELLO)
    assert servers() == [pid]
    assert first.returncode == second.returncode == 0
    assert second.stdout == "[rank 0] hello 0\n"
    assert jobs_of(kept_warm) == {pid: before[pid] + 1}


def test_the_variable_asks_for_a_warm_start_as_the_flag_does(kept_warm):
    kept_warm(HELLO)
    ((pid, before),) = jobs_of(kept_warm).items()
    done = subprocess.run(
        [*PHALANX_RUN, "--nproc-per-node", "1", kept_warm.write(HELLO)], env={**os.environ, "PHALANX_WARM": "1"}
    )
    assert done.returncode == 0
    assert jobs_of(kept_warm) == {pid: before + 1}


@pytest.mark.usefixtures("needs_hosts")
def test_a_job_of_another_host_runs_there(kept_warm):
    kept_warm(HELLO)
    (pid,) = servers()
    tell = "import os; print(os.uname().nodename, os.readlink('/proc/self/ns/net'))"
    with hosts(1) as (host,):
        network = os.readlink(f"/proc/{host.pid}/ns/net")
        with host.start(kept_warm.command(tell), stdout=subprocess.PIPE, text=True) as job:
            assert job.communicate(timeout=LIMIT_S)[0] == f"[rank 0] host-a {network}\n"
    assert servers() == [pid]
    assert network not in kept_warm(tell).stdout


def test_a_trial_that_starts_the_process_has_no_later_job_in_it(warm):
    tell = "import torch; from phalanx.launch.rank_trial import _current; print(_current and _current._folder)"
    trial = {**os.environ, "PHALANX_TRIAL": json.dumps({"folder": "FOLDER", "changes": {}, "first_steps": 3})}
    environs = [trial, {**trial, "PHALANX_TRIAL": trial["PHALANX_TRIAL"].replace("FOLDER", "another")}, os.environ]
    done = [warm(tell, env=environ) for environ in environs]
    assert [one.stdout.rpartition(" ")[2].strip() for one in done] == ["FOLDER", "another", "None"], done
    (_, listed) = warm.phalanx("warm", "--list").stdout.splitlines()
    assert listed.split()[1] == "3"  # jobs


def test_a_warm_argument_of_the_script_is_the_scripts(kept_warm):
    kept_warm(HELLO)
    before = jobs_of(kept_warm)
    done = kept_warm.phalanx("run", "--nproc-per-node", "1", kept_warm.write("import sys; print(sys.argv)"), "--warm")
    assert done.stdout == "[rank 0] ['train.py', '--warm']\n"
    assert jobs_of(kept_warm) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "code"),
    [("import sys; sys.exit(3)", 3), ("raise ValueError('bad')", 1), ("import os; os.kill(os.getpid(), 9)", 137)],
)
def test_the_command_ends_as_its_job(warm, source, code):
    cold = warm.phalanx("run", "--nproc-per-node", "1", warm.write(source))
    warm(HELLO)
    done = warm(source)
    assert done.returncode == cold.returncode == code
    # but for the folder of the logs and the process's number
    assert [line.split("logs/")[0].split("(pid")[0] for line in done.stderr.splitlines()] == [
        line.split("logs/")[0].split("(pid")[0] for line in cold.stderr.splitlines()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("redirection", ["<&-", "< /dev/null >&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_may_be_closed(warm, redirection):
    warm(HELLO)
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", *warm.command("open('done', 'w')")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert (warm.folder / "done").exists()
    assert len(servers()) == 1


def test_mistakes_and_help_are_as_without_it(kept_warm):
    kept_warm(HELLO)
    for args in (["nothing.py"], ["--help"], ["--nnodes", "x", "train.py"]):
        cold, ours = kept_warm.phalanx("run", *args), kept_warm.phalanx("run", "--warm", *args)
        said = ours.stderr.replace("phalanx run --warm ", "phalanx run ")  # a proposed call keeps the user's flags
        assert (ours.returncode, ours.stdout, said) == (cold.returncode, cold.stdout, cold.stderr)


def test_a_dry_run_says_whether_it_would_be_warm(warm):
    warm(HELLO)
    assert last_line_of_dry_run(warm) == "phalanx run: warm start"
    other = "phalanx run: starts a warm process first; the one there was started with another CUDA_VISIBLE_DEVICES"
    assert last_line_of_dry_run(warm, env={**os.environ, "CUDA_VISIBLE_DEVICES": "7"}) == other
    no_warm_start = "phalanx run: no warm start: each rank imports torch for itself"
    assert last_line_of_dry_run(warm, "--no-preload") == no_warm_start
    assert len(servers()) == 1


# ---------------------------------------------------------------- what must not be shared


def changed(name, value):
    return lambda warm: {"env": {**os.environ, name: value}}


def before(act):
    """Return what makes a command do something before it begins."""
    return lambda warm: {"preexec_fn": act}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "source"),
    [
        (changed("OMP_NUM_THREADS", "7"), "import torch; print(torch.get_num_threads())"),
        (changed("MKL_NUM_THREADS", "7"), "print('x')"),
        (changed("CUDA_VISIBLE_DEVICES", "1"), "print('x')"),
        (changed("GOMP_SPINCOUNT", "7"), "print('x')"),
        (changed("SOMETHING_NEW", "7"), "import os; print(os.environ['SOMETHING_NEW'])"),
        (changed("PYTHONPATH", "/nowhere"), "import sys; print('/nowhere' in sys.path)"),
        (changed("PHALANX_REPLACE", "gloo"), "print('x')"),
        (
            before(lambda: resource.setrlimit(resource.RLIMIT_STACK, (4 << 20, 8 << 20))),
            "import resource; print(resource.getrlimit(resource.RLIMIT_STACK))",
        ),
        (before(lambda: os.setgroups([7])), "import os; print(os.getgroups())"),
        (before(lambda: os.nice(3)), "import os; print(os.nice(0))"),
        (before(lambda: os.sched_setaffinity(0, {0})), "import os; print(os.sched_getaffinity(0))"),
        (
            before(lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)),
            "import signal; print(signal.getsignal(signal.SIGHUP))",
        ),
        (
            before(lambda: Path("/proc/self/oom_score_adj").write_text("5")),
            "print(open('/proc/self/oom_score_adj').read())",
        ),
    ],
    ids=[
        "omp",
        "mkl",
        "cuda",
        "gomp",
        "unknown",
        "pythonpath",
        "replace",
        "limit",
        "groups",
        "nice",
        "cpus",
        "ignored",
        "oom",
    ],
)
def test_what_only_counts_when_a_process_starts_starts_another(warm, change, source):
    warm(HELLO)
    (there,) = servers()
    options = change(warm)
    cold = warm.phalanx("run", "--nproc-per-node", "1", warm.write(source), **options)
    done = warm(source, **options)
    assert done.returncode == 0, done.stderr
    assert done.stdout == cold.stdout
    assert there in servers()
    assert len(servers()) == 2
    assert warm(HELLO).stdout == "[rank 0] hello 0\n"
    assert len(servers()) == 2


@pytest.mark.slow
def test_another_number_of_threads_starts_another(warm):
    source = "import os, torch; print(torch.get_num_threads(), os.environ['OMP_NUM_THREADS'])"
    flags = ("--no-pin",)
    said = {warm(source, *flags, num_ranks=number).stdout.split()[-1] for number in (1, 2, 1)}
    num_cpus = len(os.sched_getaffinity(0))
    assert len(said) == min(2, num_cpus)
    assert len(servers()) == min(2, num_cpus)


def test_jobs_of_one_process_draw_numbers_of_their_own(kept_warm):
    source = """
    import logging, multiprocessing, random, tempfile, uuid, numpy, torch
    record = logging.makeLogRecord({})
    print("logs from", record.created - record.relativeCreated / 1000)
    print(torch.initial_seed(), torch.rand(1).item(), numpy.random.rand(), random.random(), uuid.uuid4(),
          tempfile.mktemp(), multiprocessing.current_process().authkey.hex())
    """
    said = []
    for _ in range(3):
        began_s = time.time()
        first, last = kept_warm(source).stdout.splitlines()
        assert float(first.split()[-1]) > began_s
        said.append(last.split()[2:])
    assert [len(set(several)) for several in zip(*said, strict=True)] == [3] * 7
    assert len(servers()) == 1


@pytest.mark.slow
def test_a_package_that_was_installed_meanwhile_ends_the_process(warm, tmp_path):
    import sysconfig

    warm(HELLO)
    (before,) = servers()
    new = Path(sysconfig.get_paths()["purelib"], f"phalanx_test_{os.getpid()}.py")
    new.write_text("")
    try:
        done = warm(f"import {new.stem}; print('found')")
        assert done.stdout == "[rank 0] found\n"
        assert ends(before)
        assert len(servers()) == 1
    finally:
        new.unlink()
        for compiled in new.parent.glob(f"__pycache__/{new.stem}.*"):
            compiled.unlink()


def test_a_module_that_hides_an_imported_one_ends_the_process(warm, tmp_path):
    (tmp_path / "own").mkdir()
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "own")}
    source = "import torch; print(torch.__version__)"
    assert warm(source, env=environ).returncode == 0
    (there,) = servers()
    (tmp_path / "own" / "notes.txt").write_text("")
    warm(HELLO, env=environ)
    assert servers() == [there]
    (tmp_path / "own" / "torch.py").write_text("raise ImportError('mine')")
    done = warm(source, env=environ)
    assert ends(there)
    assert "phalanx run: no warm start: the new process ImportError: mine" in done.stderr
    assert (done.returncode, done.stdout) == (1, "")
    assert servers() == []


def test_a_relative_pythonpath_is_no_warm_start(warm):
    done = warm(HELLO, env={**os.environ, "PYTHONPATH": "src"})
    assert done.stdout == "[rank 0] hello 0\n"
    assert "no warm start: PYTHONPATH has 'src', which depends on the current folder" in done.stderr
    assert servers() == []


# ---------------------------------------------------------------- sockets


def test_a_stale_socket_is_removed(kept_warm):
    kept_warm(HELLO)
    (pid,) = servers()
    os.kill(pid, signal.SIGKILL)
    assert ends(pid)
    (stale,) = sockets()
    assert kept_warm(HELLO).stdout == "[rank 0] hello 0\n"
    assert stale not in sockets()
    assert len(servers()) == 1


def open_to_all(folder):
    folder.chmod(0o755)


def of_another_user(folder):
    """As where sudo keeps XDG_RUNTIME_DIR."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(folder, 65534, 65534)


@pytest.mark.slow
@pytest.mark.parametrize("spoil", [open_to_all, of_another_user])
def test_a_folder_that_is_not_private_is_left_alone(warm, spoil):
    warm(HELLO)
    (path,) = sockets()
    assert path.parent.stat().st_mode & 0o777 == 0o700
    spoil(path.parent)
    before = path.stat().st_mtime_ns
    done = warm(HELLO)  # from another, in /tmp or /dev/shm, or one that is there from before
    assert done.stdout == "[rank 0] hello 0\n"
    assert path.stat().st_mtime_ns == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of others")
def test_a_socket_of_another_user_is_ignored(warm):
    folder = Path(os.environ["XDG_RUNTIME_DIR"], "phalanx")
    folder.parent.chmod(0o755)
    folder.mkdir()
    program = """if True:
        import os, socket, sys
        os.setuid(65534)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(sys.argv[1])
        listener.listen()
        print("up", flush=True)
        print(len(listener.accept()[0].recv(100)))
    """
    folder.chmod(0o777)
    with subprocess.Popen(
        [sys.executable, "-c", program, str(folder / "1.sock")], stdout=subprocess.PIPE, text=True
    ) as foreign:
        assert foreign.stdout.readline() == "up\n"
        folder.chmod(0o700)
        assert warm(HELLO).stdout == "[rank 0] hello 0\n"
        assert foreign.stdout.readline() == "0\n"  # it was told nothing
    assert len(servers()) == 1


def test_without_a_place_for_a_socket_the_job_runs_cold(warm, tmp_path):
    # A file where each folder would be made, as a full file system refuses it, too.
    program = """if True:
        import sys
        from phalanx import cli
        from phalanx.wire import places
        places.folders = lambda: ["/proc/none"]
        sys.exit(cli.main(sys.argv[1:]))
    """
    command = [sys.executable, "-c", program, "run", "--nproc-per-node", "1", "--warm", warm.write(HELLO)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout == "[rank 0] hello 0\n"
    assert "phalanx run: no warm start: no place for a socket: " in done.stderr


def test_what_a_script_sets_above_import_torch_counts(warm):
    source = """
        import os
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = LEVEL
        import torch.distributed as dist
        print(dist.get_debug_level().name)
    """
    for level, num_servers in (("DETAIL", 1), ("DETAIL", 1), ("INFO", 2)):
        done = warm(source.replace("LEVEL", repr(level)))
        assert done.returncode == 0, done.stderr
        assert "no warm start" not in done.stderr
        assert done.stdout.split()[-1] == level
        assert len(servers()) == num_servers
