"""What a failing job says last, what it leaves in its folder, and what it does when told to try again."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from phalanx.failure.ending import Ending
from phalanx.failure.hints import hint_for
from tests.launch.jobs import LIMIT_S, PHALANX_RUN, run_job, write_script

pytestmark = pytest.mark.usefixtures("warm_jobs")

TWO_MEET = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
"""


def folder_of(tmp_path, base="logs/train"):
    (run,) = (tmp_path / base).iterdir()
    return run


@pytest.mark.parametrize(
    ("source", "code", "said", "hint", "entry"),
    [
        ("import no_such_package", 1, "ModuleNotFoundError", "-m pip install no_such_package", ""),
        ("raise MemoryError", 1, "MemoryError", "smaller batch, or fewer ranks", "out-of-memory"),
        ("os.kill(os.getpid(), signal.SIGILL)", 132, "was killed by SIGILL", "this processor lacks", "rank-killed"),
        (
            "import faulthandler; faulthandler._sigsegv()",
            139,
            "was killed by SIGSEGV",
            "native code crashed",
            "exit-139",
        ),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            137,
            "was killed by SIGKILL",
            "it was killed from outside",
            "exit-137",
        ),
        ("os.abort()", 134, "was killed by SIGABRT", "native code gave up", "exit-134"),
        ("raise OSError(28, 'No space left on device')", 1, "OSError", "the disk or /dev/shm is full", "disk-full"),
        ("raise RuntimeError('No CUDA GPUs are available')", 1, "RuntimeError", "torch finds no GPU here", "no-gpu"),
        ("sys.exit(3)", 3, "exited with code 3", "", ""),
        ("sys.exit('bad configuration')", 1, "exited with code 1", "", ""),
    ],
)
def test_the_end_says_how_where_and_what_to_do(tmp_path, source, code, said, hint, entry):
    done = run_job(tmp_path, f"if RANK == 1: {source}\nwhile True: signal.pause()", "--no-preload")
    assert done.returncode == code, done.stderr
    last = done.stderr[done.stderr.index("phalanx run: rank 1 (pid ") :]
    assert said in last.splitlines()[0]
    assert last.splitlines()[0].endswith(f"code {code}")
    assert "\n  rank 0: ended because of it\n" in last
    assert f"  log: {folder_of(tmp_path).relative_to(tmp_path)}/attempt_0/rank_1/stderr.log\n" in last
    assert ("  hint: " in last) == bool(hint)
    assert hint in last.splitlines()[-1] or not hint
    assert last.rstrip().endswith(f" (phalanx explain {entry})") or not entry
    assert len(last.splitlines()) < 24


KILLED_AT_ONCE = """
from phalanx.record.notes import note_checkpoints
if RANK == 0:
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    os.mkdir("checkpoints")
    with open("checkpoints/latest", "w") as file:
        file.write("step-40")
    note_checkpoints("checkpoints")
    os.mkdir("ready")
while RANK == 1 and not os.path.exists("ready"): time.sleep(0.01)
if RANK == 1: os.kill(os.getpid(), signal.SIGKILL)
while True: signal.pause()
"""


def test_ranks_killed_at_once_are_all_named_and_how_a_training_goes_on(tmp_path):
    done = run_job(tmp_path, KILLED_AT_ONCE, "--no-preload")
    assert done.returncode == 137, done.stderr
    last = done.stderr[done.stderr.index("phalanx run: rank 1 (pid ") :]
    assert "\n  rank 0: killed by SIGKILL\n" in last
    saved = "the newest checkpoint on disk is that of step 40"
    assert f"\n  to resume, start it again: {saved}; --max-restarts N does so automatically\n" in last


def test_a_crash_in_native_code_shows_the_line_of_python(tmp_path):
    done = run_job(
        tmp_path,
        "import faulthandler\ndef step(): faulthandler._sigsegv()\nif RANK == 0: step()\nsignal.pause()",
        "--no-preload",
    )
    assert 'train.py", line 4 in step' in done.stderr[done.stderr.index("phalanx run: rank 0") :]


def test_memory_that_the_kernel_took_is_told_from_a_kill_by_hand():
    killed = Ending(rank=0, pid=1, exitcode=-signal.SIGKILL)
    assert "because memory ran out" in hint_for(killed, num_oom_kills=1)
    assert "killed from outside" in hint_for(killed, num_oom_kills=0)
    shells = Ending(rank=0, pid=1, exitcode=128 + signal.SIGKILL)
    assert "because memory ran out" in hint_for(shells, num_oom_kills=1)


def test_the_cause_is_named_and_its_victims_take_one_line(tmp_path):
    done = run_job(tmp_path, TWO_MEET + "if RANK == 2: os._exit(9)\ndist.barrier()\n", "--warm", num_ranks=4)
    assert done.returncode == 9, done.stderr
    ours = [line for line in done.stderr.splitlines() if line.startswith("phalanx run: ")]
    *begin, end = ours[next(i for i, line in enumerate(ours) if "logs in" in line) :]
    assert len(begin) == 1
    assert re.fullmatch(r"phalanx run: rank 2 \(pid \d+\) exited with code 9", end)
    assert re.search(
        r"^  ranks? (\d|\d-\d|\d and \d|0, 1 and 3): (RuntimeError, because of it|ended because of it)$",
        done.stderr,
        re.M,
    )
    assert "Traceback" not in done.stderr  # a victim's is in its log


def test_each_rank_has_its_streams_and_its_error_in_the_runs_folder(tmp_path):
    done = run_job(
        tmp_path,
        """
        print("out", RANK, flush=True); print("err", RANK, file=sys.stderr, flush=True)
        if RANK == 0:
            open("done", "w").close()
            sys.exit()
        while not os.path.exists("done"): time.sleep(0.01)
        raise KeyError("lr")
        """,
        "--no-preload",
    )
    assert done.returncode == 1
    attempt = folder_of(tmp_path) / "attempt_0"
    assert (attempt / "rank_0" / "stdout.log").read_text() == "out 0\n"
    assert (attempt / "rank_1" / "stderr.log").read_text().startswith("err 1\nTraceback")
    assert not (attempt / "rank_0" / "error.json").exists()
    error = json.loads((attempt / "rank_1" / "error.json").read_text())
    assert error["message"]["message"] == "KeyError: 'lr'"
    assert "raise KeyError" in error["message"]["extraInfo"]["py_callstack"]
    assert (error["rank"], error["exit_code"], error["signal"]) == (1, 1, None)


def test_the_error_file_of_torchs_record_is_kept(tmp_path):
    source = """
    from torch.distributed.elastic.multiprocessing.errors import record
    @record
    def main(): raise ValueError("bad learning rate")
    main()
    """
    done = run_job(tmp_path, source, "--warm", num_ranks=1)
    assert done.returncode == 1
    error = json.loads((folder_of(tmp_path) / "attempt_0/rank_0/error.json").read_text())
    assert error["message"]["message"] == "ValueError: bad learning rate"
    assert "exit_code" not in error


SPEAK = "print('out', RANK, flush=True); print('err', RANK, file=sys.stderr, flush=True)"


@pytest.mark.parametrize(
    ("flags", "out", "err"),
    [
        ((), {0, 1}, {0, 1}),
        (("-r", "1"), set(), {0, 1}),
        (("-r", "3"), set(), set()),
        (("-r", "0:1,1:2"), {1}, {0}),
        (("-r", "3", "-t", "0:3"), {0}, {0}),
        (("--local-ranks-filter", "1"), {1}, {1}),
        (("-t", "3"), {0, 1}, {0, 1}),
    ],
)
def test_streams_are_kept_off_the_screen_and_never_out_of_the_logs(tmp_path, flags, out, err):
    done = run_job(tmp_path, SPEAK, "--no-preload", "--log-dir", str(tmp_path / "here"), *flags)
    assert done.returncode == 0, done.stderr
    assert {rank for rank in range(2) if f"out {rank}" in done.stdout} == out
    assert {rank for rank in range(2) if f"err {rank}" in done.stderr} == err
    attempt = folder_of(tmp_path, "here") / "attempt_0"
    for rank in range(2):
        assert (attempt / f"rank_{rank}" / "stdout.log").read_text() == f"out {rank}\n"
        assert (attempt / f"rank_{rank}" / "stderr.log").read_text() == f"err {rank}\n"


def test_a_log_dir_that_cannot_be_made_is_refused_in_one_line(cold_jobs, tmp_path):
    (tmp_path / "file").touch()
    done = run_job(tmp_path, SPEAK, "--log-dir", str(tmp_path / "file" / "logs"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "--log-dir" in done.stderr


def test_a_taken_port_names_its_owner_and_what_to_do(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run_job(tmp_path, SPEAK, "--master-port", str(port))
        nodes = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port))
        first_of_two = run_job(tmp_path, SPEAK, "--no-preload", *nodes)
    assert f"port {port} is taken by pid {os.getpid()} (" in first_of_two.stderr
    assert "use another --master-port (or --rdzv-endpoint), the same on every node" in first_of_two.stderr
    assert (done.returncode, done.stdout) == (1, "")
    assert f"port {port} is taken by " in done.stderr
    assert f"pid {os.getpid()} (" in done.stderr
    assert "use another --master-port, or leave it out to have a free one chosen" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_a_failed_group_starts_again_with_a_fresh_rendezvous(tmp_path, backend):
    source = f"""
    import torch, torch.distributed as dist
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("{backend}")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    print("attempt", attempt, "of", os.environ["TORCHELASTIC_MAX_RESTARTS"], "rank", RANK, tensor.item(), flush=True)
    dist.barrier()
    if attempt < 2 and RANK == attempt: os._exit(5 + attempt)
    dist.barrier()
    dist.destroy_process_group()
    """
    done = run_job(tmp_path, source, "--warm", "--max-restarts", "2")
    assert done.returncode == 0, done.stderr
    want = [f"[rank {rank}] attempt {attempt} of 2 rank {rank} 2.0" for attempt in range(3) for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == sorted(want)
    for number, code in ((1, 5), (2, 6)):
        assert f"exited with code {code}\nphalanx run: restart {number} of 2\n" in done.stderr
    assert sorted(path.name for path in folder_of(tmp_path).glob("attempt_*")) == [
        "attempt_0",
        "attempt_1",
        "attempt_2",
    ]


def test_restarts_come_to_an_end(tmp_path):
    done = run_job(tmp_path, "sys.exit(7)", "--max-restarts", "1", "--no-preload", num_ranks=1)
    assert done.returncode == 7
    assert done.stderr.count("phalanx run: restart") == 1


def test_sigusr1_is_given_on_when_asked_for_and_does_not_end_the_job(tmp_path):
    source = """
    signal.signal(signal.SIGUSR1, lambda *_: (print("checkpoint", RANK, flush=True), sys.exit(0)))
    print("up", flush=True)
    signal.pause()
    """
    command = [*PHALANX_RUN, "--nproc-per-node", "2", "--no-preload", "--signals-to-handle", "SIGTERM,SIGUSR1"]
    job = subprocess.Popen(
        [*command, write_script(tmp_path, source)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with job:
        assert sorted(job.stdout.readline() for _ in range(2)) == ["[rank 0] up\n", "[rank 1] up\n"]
        job.send_signal(signal.SIGUSR1)
        out, err = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, err
    assert sorted(out.splitlines()) == ["[rank 0] checkpoint 0", "[rank 1] checkpoint 1"]


def test_the_error_file_is_found_after_a_change_of_folder(tmp_path):
    source = """
    from torch.distributed.elastic.multiprocessing.errors import record
    @record
    def main(): raise ValueError("bad learning rate")
    os.mkdir("elsewhere")
    os.chdir("elsewhere")
    main()
    """
    done = run_job(tmp_path, source, "--warm", num_ranks=1)
    assert "raised ValueError and exited with code 1" in done.stderr
    error = json.loads((folder_of(tmp_path) / "attempt_0/rank_0/error.json").read_text())
    assert error["message"]["message"] == "ValueError: bad learning rate"


@pytest.mark.parametrize("redirection", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-", ">/dev/full", "2>/dev/full"])
def test_a_job_runs_without_some_of_its_streams_and_the_logs_have_all(tmp_path, redirection):
    script = write_script(tmp_path, SPEAK + "\nif RANK == 0: assert sys.stdin.read() == ''")
    command = " ".join([*PHALANX_RUN, "--nproc-per-node", "2", "--warm", "--no-preload", script, redirection])
    done = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "can't write to" in done.stdout + done.stderr or "full" not in redirection
    for rank in range(2):
        folder = folder_of(tmp_path) / "attempt_0" / f"rank_{rank}"
        assert (folder / "stdout.log").read_text() == f"out {rank}\n"
        assert (folder / "stderr.log").read_text() == f"err {rank}\n"


def test_an_error_that_a_rank_had_caught_does_not_make_it_a_victim(tmp_path):
    source = """
    import traceback
    class RankFailed(Exception): pass
    if RANK == 1:
        try: raise RankFailed("an old one")
        except RankFailed: traceback.print_exc()
        os.kill(os.getpid(), signal.SIGKILL)
    while not os.path.exists("dead"): time.sleep(0.01)
    """
    done = run_job(tmp_path, source, "--no-preload", "--shutdown-timeout", "20")
    assert done.returncode == 137
    assert "phalanx run: rank 1 (pid " in done.stderr
    assert "was killed by SIGKILL; exit code 137" in done.stderr


def test_a_killed_forker_is_a_failure_like_any_other(tmp_path):
    source = """
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if RANK == 0: os.kill(os.getppid(), signal.SIGKILL)
        while True: signal.pause()
    print("again", flush=True)
    """
    done = run_job(tmp_path, source, "--max-restarts", "1")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 0] again", "[rank 1] again"]
    assert "the process that starts the ranks (pid " in done.stderr
    done = run_job(tmp_path, source, "--warm")
    assert done.returncode == 137
    assert "was killed by SIGKILL; exit code 137\n" in done.stderr
    assert "launch.log\n" in done.stderr


def test_a_program_finds_the_signals_that_a_shell_would_give_it(tmp_path):
    command = [*PHALANX_RUN, "--nproc-per-node", "1", "--no-python", "grep", "SigIgn", "/proc/self/status"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    ignored = int(done.stdout.split()[-1], 16)
    assert not ignored & (1 << signal.SIGPIPE - 1)
    assert not ignored & (1 << signal.SIGTTIN - 1)


def test_an_error_at_exit_is_not_taken_for_the_cause(tmp_path):
    source = """
    import atexit
    def close(): raise ConnectionResetError("the other side has gone")
    if RANK == 1:
        atexit.register(close)
        raise ValueError("bad learning rate")
    while True: signal.pause()
    """
    done = run_job(tmp_path, source, "--no-preload")
    assert "raised ValueError and exited with code 1" in done.stderr


def test_sigusr1_is_not_given_to_what_a_rank_has_started(tmp_path):
    source = """
    import subprocess
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    signal.signal(signal.SIGUSR1, lambda *_: child.stdin.close())
    print("up", flush=True)
    print("child", child.wait(), flush=True)
    """
    command = [*PHALANX_RUN, "--nproc-per-node", "1", "--no-preload", "--signals-to-handle", "SIGTERM,SIGUSR1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
    with subprocess.Popen([*command, write_script(tmp_path, source)], **pipes) as job:
        assert job.stdout.readline() == "[rank 0] up\n"
        job.send_signal(signal.SIGUSR1)
        out, err = job.communicate(timeout=LIMIT_S)
    assert (job.returncode, out) == (0, "[rank 0] child 0\n"), err


def test_a_reader_that_stands_still_does_not_keep_the_job_from_ending(tmp_path):
    source = """
    if RANK == 0:
        print("up", os.getpid(), flush=True)
        while True: print("x" * 1000)
    signal.pause()
    """
    command = [*PHALANX_RUN, "--nproc-per-node", "2", "--no-preload", write_script(tmp_path, source)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as job:
        job.stdout.readline()  # and no more
        job.send_signal(signal.SIGINT)
        assert job.wait(LIMIT_S) == 130


def test_logs_that_cannot_be_written_are_said_to_be_not_whole(tmp_path):
    script = write_script(tmp_path, "for _ in range(100): print('x' * 1000, flush=True)")
    limit = "import resource, signal, os, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", limit, *PHALANX_RUN, "--nproc-per-node", "1", "--no-preload", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("x" * 1000) == 100
    assert done.stderr.count("are incomplete: File too large") == 1


def test_too_few_descriptors_are_said_before_anything_starts(cold_jobs, tmp_path):
    command = ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh", *PHALANX_RUN, "--nproc-per-node", "16"]
    done = subprocess.run(
        [*command, write_script(tmp_path, SPEAK)], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "16 ranks need some 128 open files, the limit is 64" in done.stderr


def test_a_rank_keeps_the_descriptor_limit_of_the_user(tmp_path):
    command = ["sh", "-c", 'ulimit -S -n 200; exec "$@"', "sh", *PHALANX_RUN, "--nproc-per-node", "1", "--no-preload"]
    script = write_script(tmp_path, "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])")
    done = subprocess.run([*command, script], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout == "[rank 0] 200\n", done.stderr
