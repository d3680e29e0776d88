"""The supervisor, seen from outside: real ranks, real signals, a real terminal."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from phalanx.host.cpus import read_machine

pytestmark = pytest.mark.usefixtures("warm_jobs")

LIMIT_S = 30


@pytest.fixture
def start(tmp_path):
    """``start(num_ranks, source, *flags)`` runs a job; what still lives at the end is killed."""
    jobs = []

    def start(num_ranks, source, *flags, **options):
        script = tmp_path / "script.py"
        script.write_text("import os, signal, sys, time\nRANK = int(os.environ['RANK'])\n")
        with script.open("a") as file:
            file.write(textwrap.dedent(source))
        command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", str(num_ranks)]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        options = {"cwd": tmp_path, **options}
        jobs.append(subprocess.Popen([*command, *flags, str(script)], **options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()
        job.wait()
        for pipe in (job.stdout, job.stderr):
            if pipe is not None:
                pipe.close()


def finish(job):
    """Return exit code, stdout, and stderr without the lines that open it."""
    out, err = job.communicate(timeout=LIMIT_S)
    opening, said, rest = err.decode().partition("logs in ")
    assert opening.startswith("phalanx run: "), err
    assert said
    return job.returncode, out.decode(), rest.partition("\n")[2]


def read_pids(job, num_ranks):
    """Return the ranks' pids in rank order; each rank prints its own once it is ready."""
    lines = sorted(job.stdout.readline().decode() for _ in range(num_ranks))
    return [int(line.split()[-1]) for line in lines]


def wait_for_end(pids):
    """Wait until every one of `pids` has ended; fail at the limit."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            ended = select.select([pidfd], [], [], LIMIT_S)[0]
            os.close(pidfd)
            assert ended, f"process {pid} still lives"


ECHO_PID = "print(os.getpid(), flush=True)\n"
FOREVER = ECHO_PID + "while True: signal.pause()\n"


def on_cue(action):
    """Return a script whose ranks say that they are up and do `action` on SIGUSR1."""
    return f"""
    def act(*_):
        {action}
    signal.signal(signal.SIGUSR1, act)
    {ECHO_PID.strip()}
    while True: signal.pause()
    """


@pytest.mark.slow
@pytest.mark.skipif(read_machine().num_cores < 2, reason="one core: nothing to divide")
def test_ranks_are_pinned_to_cores_of_their_own_unless_told_not_to(start):
    script = "print(sorted(os.sched_getaffinity(0)))\n"
    whole = sorted(os.sched_getaffinity(0))
    code, out, err = finish(start(2, script))
    assert code == 0, err
    first, second = (set(json.loads(line.split("] ", 1)[1])) for line in out.splitlines())
    assert first
    assert second
    assert first | second == set(whole)
    assert not first & second
    code, out, err = finish(start(2, script, "--no-pin"))
    assert code == 0, err
    assert [json.loads(line.split("] ", 1)[1]) for line in out.splitlines()] == [whole, whole]


def test_every_rank_finds_torchruns_environment(start, monkeypatch):
    for name in ("OMP_NUM_THREADS", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)
    code, out, err = finish(start(2, "import json; print(json.dumps(dict(os.environ)))"))
    assert code == 0, err
    found = {}
    for line in out.splitlines():
        environ = json.loads(line.split("] ", 1)[1])
        found[int(environ["RANK"])] = environ
    for rank in range(2):
        want = {
            "RANK": f"{rank}",
            "LOCAL_RANK": f"{rank}",
            "ROLE_RANK": f"{rank}",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "ROLE_WORLD_SIZE": "2",
            "ROLE_NAME": "default",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "NODE_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2)),
        }
        assert {key: found[rank].get(key) for key in want} == want
    assert found[0]["MASTER_PORT"] == found[1]["MASTER_PORT"] != "0"
    assert found[0]["TORCHELASTIC_RUN_ID"] == found[1]["TORCHELASTIC_RUN_ID"] != ""
    error_files = {found[rank]["TORCHELASTIC_ERROR_FILE"] for rank in range(2)}
    assert len(error_files) == 2
    assert not any(os.path.exists(path) for path in error_files)


def test_the_users_thread_count_and_address_are_kept(start, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    job = start(
        1,
        "print(*(os.environ[k] for k in ('OMP_NUM_THREADS', 'MASTER_ADDR', 'MASTER_PORT')))",
        "--master-addr=localhost",
        "--master_port=29517",
    )
    assert finish(job)[1] == "[rank 0] 7 localhost 29517\n"


def test_the_ranks_meet_over_the_exported_address(start):
    source = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor(RANK + 1)
    dist.all_reduce(total)
    print(total.item())
    dist.destroy_process_group()
    """
    code, out, err = finish(start(2, source))
    assert code == 0, err
    assert sorted(out.splitlines()) == ["[rank 0] 3", "[rank 1] 3"]


def test_lines_are_prefixed_and_never_interleave(start):
    source = """
    for number in range(300):
        for piece in (f"{number} ", str(RANK) * 50, "\\n"):
            os.write(1, piece.encode())
    os.write(1, b"no end")
    """
    code, out, _ = finish(start(3, source))
    assert code == 0
    for rank in range(3):
        mine = [line for line in out.splitlines() if line.startswith(f"[rank {rank}] ")]
        want = [f"[rank {rank}] {n} {str(rank) * 50}" for n in range(300)]
        assert mine == [*want, f"[rank {rank}] no end"]
    assert len(out.splitlines()) == 3 * 301


def test_stdout_and_stderr_stay_apart_and_a_bar_is_one_line_in_a_pipe(start):
    code, out, err = finish(start(1, "print('10%\\r50%\\r100%'); print('warning', file=sys.stderr)"))
    assert (code, out, err) == (0, "[rank 0] 100%\n", "[rank 0] warning\n")


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("os._exit(7)", 7, "exited with code 7"),
        ("raise ValueError('bad batch')", 1, "raised ValueError and exited with code 1"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL; exit code 137"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "was killed by SIGSEGV; exit code 139"),
    ],
)
def test_a_failing_rank_ends_the_others_and_is_named(start, end, code, said):
    job = start(3, on_cue(end))
    pids = read_pids(job, 3)
    os.kill(pids[1], signal.SIGUSR1)
    got, _, err = finish(job)
    assert got == code
    assert "  ranks 0 and 2: ended because of it\n" in err
    last_words = err[err.rindex("phalanx run: ") :].splitlines()
    assert last_words[0] == f"phalanx run: rank 1 (pid {pids[1]}) {said}"
    assert any(line.startswith("  log: ") and line.endswith("rank_1/stderr.log") for line in last_words)
    assert "supervisor.py" not in err
    assert "sitecustomize" not in err
    wait_for_end(pids)


def test_the_last_words_of_a_failing_rank_are_shown(start):
    code, _, err = finish(start(2, "if RANK == 1: raise ValueError('bad batch')\nsignal.pause()"))
    assert code == 1
    assert err.count("ValueError: bad batch") == 1
    assert "\n  ValueError: bad batch\n" in err


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace_period(start):
    source = "    signal.signal(signal.SIGTERM, signal.SIG_IGN)" + on_cue("os._exit(3)")
    job = start(2, source, "--shutdown-timeout", "0.2")
    pids = read_pids(job, 2)
    os.kill(pids[1], signal.SIGUSR1)
    begin = time.monotonic()
    code, _, _ = finish(job)
    assert code == 3
    assert time.monotonic() - begin < 10


def test_what_a_rank_has_started_ends_with_it(start):
    source = """
    import subprocess
    child = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL)
    print(child.pid, flush=True)
    """
    job = start(2, source)
    children = read_pids(job, 2)
    assert finish(job)[0] == 0
    wait_for_end(children)


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_rank_and_ends_the_job_quietly(start, sig):
    source = f"""
    def obey(got, frame):
        print("got", signal.Signals(got).name, flush=True)
        sys.exit(0)
    signal.signal({int(sig)}, obey)
    {ECHO_PID.strip()}
    while True: signal.pause()
    """
    job = start(2, source)
    read_pids(job, 2)
    job.send_signal(sig)
    code, out, err = finish(job)
    assert code == 128 + sig
    assert sorted(out.splitlines()) == [f"[rank {rank}] got {sig.name}" for rank in range(2)]
    again = "; Ctrl-C again kills them" if sig == signal.SIGINT else ""
    assert err == f"phalanx run: {sig.name}: ending 2 ranks{again}\n"


def test_a_rank_that_is_told_to_end_still_has_what_it_has_started(start):
    source = """
    import subprocess
    logger = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    def log(*_):
        logger.stdin.write("saved\\n")
        print("logged", logger.stdout.readline(), end="", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, log)
    print(os.getpid(), flush=True)
    while True: signal.pause()
    """
    job = start(2, source, "--no-preload")
    read_pids(job, 2)
    job.terminate()
    code, out, _ = finish(job)
    assert (code, out.count("logged saved\n")) == (143, 2)


def test_a_program_that_passes_no_signal_on_is_told_to_end_with_its_children(start, tmp_path):
    script = tmp_path / "wrapper.sh"
    script.write_text(f'trap : TERM\n{sys.executable} "$@"\n')
    source = """
    def leave(*_):
        print("left", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, leave)
    print(os.getpid(), flush=True)
    while True: signal.pause()
    """
    job = start(1, source, "--no-python", "sh", str(script))
    read_pids(job, 1)
    job.terminate()
    code, out, _ = finish(job)
    assert (code, out) == (143, "[rank 0] left\n")


def test_a_second_interrupt_kills_at_once(start):
    source = f"""
    def ignore(*_): print("not now", flush=True)
    signal.signal(signal.SIGINT, ignore)
    {ECHO_PID.strip()}
    while True: signal.pause()
    """
    job = start(2, source)
    pids = read_pids(job, 2)
    job.send_signal(signal.SIGINT)
    assert [job.stdout.readline().endswith(b"not now\n") for _ in range(2)] == [True, True]
    job.send_signal(signal.SIGINT)
    assert finish(job)[0] == 130
    wait_for_end(pids)


def test_a_killed_supervisor_leaves_no_rank(start):
    job = start(3, FOREVER)
    pids = read_pids(job, 3)
    job.kill()
    wait_for_end(pids)


def test_a_stopped_rank_is_ended_too(start):
    job = start(2, FOREVER)
    pids = read_pids(job, 2)
    os.kill(pids[0], signal.SIGSTOP)
    os.kill(pids[1], signal.SIGKILL)
    assert finish(job)[0] == 137
    wait_for_end(pids)


@pytest.mark.parametrize("merged", [False, True], ids=["stdout", "both"])
def test_a_reader_that_goes_away_ends_the_job_and_ranks_can_save(start, tmp_path, merged):
    source = """
    def save(*_):
        for _ in range(100): print("x" * 1000, flush=True)
        open(f"saved_{RANK}", "w").close()
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    """
    stderr = {"stderr": subprocess.STDOUT} if merged else {}
    job = start(2, textwrap.dedent(source) + textwrap.dedent(on_cue("print('x')")), **stderr)
    if merged:
        assert b"logs in" in job.stdout.readline()
    pids = read_pids(job, 2)
    job.stdout.close()
    os.kill(pids[0], signal.SIGUSR1)
    assert job.wait(LIMIT_S) == 128 + signal.SIGPIPE
    wait_for_end(pids)
    assert sorted(path.name for path in tmp_path.glob("saved_*")) == ["saved_0", "saved_1"]
    if not merged:
        assert b"phalanx run: nobody reads our output any more: ending 2 ranks\n" in job.stderr.read()


def test_a_reader_that_the_same_signal_ends_costs_the_ranks_no_time(start, tmp_path):
    # As Ctrl-C does in "phalanx run train.py | tee log".
    source = """
    def save(*_):
        print("saving", flush=True)
        open("saved", "w").close()
        sys.exit(0)
    signal.signal(signal.SIGINT, save)
    """
    job = start(1, textwrap.dedent(source) + FOREVER)
    pids = read_pids(job, 1)
    job.stdout.close()
    job.send_signal(signal.SIGINT)
    assert job.wait(LIMIT_S) == 128 + signal.SIGINT
    wait_for_end(pids)
    assert (tmp_path / "saved").exists()


def test_a_progress_bar_of_rank_0_lives_on_a_terminal(start):
    source = """
    if RANK == 0:
        assert sys.stdout.isatty() and sys.stderr.isatty()
        sys.stdout.write("start\\n")
        for step in range(3):
            sys.stdout.write(f"\\rstep {step}")
            sys.stdout.flush()
        sys.stdout.write("\\r\\x1b[2K\\x1b[31mdone\\x1b[0m\\n")
    else:
        assert not sys.stdout.isatty()
        print("from the other")
    """
    ours, theirs = os.openpty()
    job = start(2, source, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the job has ended
        while chunk := os.read(ours, 4096):
            shown += chunk
    os.close(ours)
    assert job.wait(LIMIT_S) == 0, shown
    zero, one = b"\x1b[36m[rank 0]\x1b[0m ", b"\x1b[33m[rank 1]\x1b[0m "
    assert zero + b"start\r\n" in shown
    for step in range(3):
        assert b"\r" + zero + b"step %d" % step in shown
    assert b"\r\x1b[2K" + zero + b"\x1b[31mdone\x1b[0m\r\n" in shown
    assert one + b"from the other\r\n" in shown
