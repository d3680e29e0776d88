"""Which processes are ranks of which job, whoever started them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx import cli
from phalanx.diagnose import commands, jobs
from phalanx.diagnose.attach import main as attach
from phalanx.diagnose.jobs import NO_JOB, NO_RANK, Job, find_job, find_jobs
from phalanx.failure.ending import Ending
from phalanx.host.processes import process_of, processes_of
from phalanx.record.box import box_of_process
from phalanx.rendezvous.launched import Launch, Notes, Started, read_started
from tests.record.made import Job as Recorded
from tests.record.made import save

pytestmark = pytest.mark.usefixtures("warm_jobs")


def test_what_is_no_rank_is_a_job_of_its_own_and_what_has_ended_is_none():
    with subprocess.Popen(["sleep", "60"]) as process:
        found = find_job(str(process.pid))
        assert found == Job("sleep", NO_JOB, process.pid, 0, found.ranks)
        assert [(rank.rank, rank.pid) for rank in found.ranks] == [(NO_RANK, process.pid)]
        process.kill()
    with pytest.raises(LookupError, match=f"^there is no process {process.pid}$"):
        find_job(str(process.pid))
    with pytest.raises(LookupError, match=r"^no job 'nothing.py' of this user is running on this host"):
        find_job("nothing.py")


@pytest.mark.parametrize("program", [["sh", "-c", "read x"], [sys.executable, "-c", "input()"]], ids=["sh", "python"])
def test_a_process_that_is_no_rank_is_never_called_one(program, capsys):
    with subprocess.Popen(program, stdin=subprocess.PIPE) as process:
        pid = process.pid
        commands = {"why": 0, "stacks": None, "top": 0, "trace": 1}
        for command, code in commands.items():
            returned = cli.main([command, str(pid)])
            said = "".join(capsys.readouterr())
            assert code in (None, returned), said
            assert not re.search(r"\brank [0-9-]", said), said
            if command == "why":
                assert said.startswith(f"process {pid} ({process_of(pid).name}) is no rank of a job; it ")
            if command == "top":
                assert f"  no job, pid {pid}  1 process  " in said
        process.communicate(b"\n")


AS_NOBODY = """
import contextlib, io, os, sys
from phalanx import cli
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    for command in sys.argv[1:]:
        cli.main(command.split())  # which imports what the other user may not read
os.seteuid(65534)
for command in sys.argv[1:]:
    print(cli.main(command.split()))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(("program", "codes"), [("mpirun", [2, 1, 1, 1, 2]), ("sleeper", [0, 1, 1, 1])])
def test_of_a_process_of_another_user_it_is_said_whose_it_is(tmp_path, program, codes):
    (tmp_path / program).symlink_to("/bin/sleep")
    with subprocess.Popen([tmp_path / program, "60"]) as process:
        pid = process.pid
        commands = [f"why {pid}", f"trace {pid}", f"stacks {pid}", f"attach 1 --job {pid}", f"top {pid} --once"]
        asked = [sys.executable, "-c", AS_NOBODY, *commands[: len(codes)]]
        done = subprocess.run(asked, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
        process.kill()
    returned = [int(line) for line in done.stdout.splitlines() if line.isdecimal()]
    assert returned == codes, done.stdout
    assert done.stdout.count("may not be looked into: it belongs to root") >= len(codes)
    assert "starting" not in done.stdout
    assert "no rank" not in done.stdout


def test_torchrun_that_has_no_ranks_yet_is_a_job_that_starts(tmp_path, capsys):
    command = [sys.executable, "-X", "utf8", "-m", "torch.distributed.run", "--nnodes", "2", "early.py"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        try:
            assert [job.name for job in find_jobs() if process.pid in job.pids] == ["early.py"]
            assert cli.main(["why", str(process.pid)]) == 0
            wanted = f"no rank of early.py runs here yet (torchrun, pid {process.pid}): starting\n"
            assert capsys.readouterr().out.startswith(wanted)
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("words", "launcher"),
    [
        (["mpirun", "-n", "2", "python", "train.py"], "mpirun"),
        (["python3.11", "-u", "/venv/bin/torchrun", "train.py"], "torchrun"),
        (["python", "-m", "phalanx", "run", "train.py"], "phalanx run"),
        (["python", "/venv/bin/phalanx", "why", "train.py"], "by hand"),
        (["slurmstepd: [4711.0]"], "srun"),
        (["vim", "torchrun"], "by hand"),
        (["python", "plot.py", "torchrun"], "by hand"),
        ([], "by hand"),
    ],
)
def test_a_launcher_is_known_by_its_program_and_not_by_another_word(monkeypatch, words, launcher):
    monkeypatch.setattr(commands, "command_of", lambda _: list(words))
    assert commands.launcher_of(1) == launcher


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["-m", "pytest", "-q", "tests/test_job.py"], "test_job.py"),
        (["/venv/bin/pytest", "tests/test_job.py::test_it[1-2]"], "test_job.py"),
        (["-m", "pytest", "-c", "pytest.ini", "tests"], "pytest"),
        (["-m", "package.train", "--data", "clean.py"], "package.train"),
        (["-c", "print()"], "-c"),
        ([], ""),
    ],
)
def test_a_job_is_named_after_its_script_and_that_of_pytest_after_the_test_file(words, name):
    assert commands.script_name(words) == name


@pytest.mark.parametrize("wanted", ["0", str(2**31), str(2**70), "9" * 5000])
def test_a_number_that_is_no_process_is_told(wanted):
    with pytest.raises(LookupError, match=f"there is no process {wanted}"):
        find_job(wanted)


def test_a_thread_of_the_kernel_is_no_process():
    kernels = [int(name) for name in os.listdir("/proc") if name.isdecimal() and is_kernels(int(name))]
    if not kernels:
        pytest.skip("in a container, no thread of the kernel shows")
    with pytest.raises(LookupError, match=f"{kernels[0]} is a thread of the kernel"):
        find_job(str(kernels[0]))


def is_kernels(pid: int) -> bool:
    """A thread of the kernel has no program."""
    try:
        os.readlink(f"/proc/{pid}/exe")
    except FileNotFoundError:
        process = process_of(pid)
        return process is not None and process.state != "Z"
    except OSError:
        return False
    return False


def test_a_job_in_a_container_is_known_by_the_pids_that_it_has_here(tmp_path, capsys):
    inside = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this container may not make another pid namespace")
    (tmp_path / "job.py").write_text(
        "import signal, torch.distributed as dist\n"
        "dist.init_process_group('phalanx'); dist.barrier()\nprint('up', flush=True); signal.pause()\n"
    )
    command = [*inside, sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2", "job.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as container:
        try:
            num_up = 0
            while num_up < 2:
                line = container.stdout.readline()
                assert line, "the job has ended"
                num_up += "up" in line
            (launcher,) = (one.pid for one in processes_of(os.geteuid()).values() if one.parent == container.pid)
            job = find_job(str(launcher))
            boxes = [box_of_process(rank.pid) for rank in job.ranks]
            assert [(box.rank, box.pid) for box in boxes] == [(0, job.ranks[0].pid), (1, job.ranks[1].pid)]
            assert [box.events[-1].thread for box in boxes] == [rank.pid for rank in job.ranks]
            assert attach(["1", "--job", str(launcher)]) == 1
            assert f"rank 1 (pid {job.ranks[1].pid}) runs in a container" in capsys.readouterr().err
        finally:
            container.kill()


def test_what_keeps_a_rank_is_none_itself():
    keeps = (
        "from phalanx.launch.processes import reaper as k; k._take_name(); import os; os.write(1, b'x'); os.read(0, 1)"
    )
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    for command, num_jobs in ((keeps, 0), (keeps.replace("k._take_name(); ", ""), 1)):
        with subprocess.Popen([sys.executable, "-c", command], env={**os.environ, **place}, **pipes) as process:
            assert process.stdout.read(1) == b"x"
            assert sum(process.pid in job.pids for job in find_jobs()) == num_jobs
            process.stdin.close()


def test_a_process_whose_name_has_parentheses_is_read(tmp_path):
    program = tmp_path / "a) S (b"
    os.symlink("/bin/sleep", program)
    with subprocess.Popen([program, "60"]) as process:
        found = process_of(process.pid)
        assert re.fullmatch(r"a\) S \(b", found.name)
        assert (found.parent, found.state in "SRD") == (os.getpid(), True)
        process.kill()
    assert process_of(process.pid) is None


@pytest.mark.parametrize("kind", ["attempt", "started", "ended", "state", "straggler"])
@pytest.mark.parametrize("facts", [None, [], {}, {"rank": 0}, [0], "x", [[]]])
def test_notes_of_another_version_are_those_of_a_job_or_refused(tmp_path, kind, facts):
    path = tmp_path / "notes"
    good = ["attempt", ["phalanx run", "phalanx run x.py", "", 2]]
    path.write_text("".join(json.dumps(note) + "\n" for note in (good, [kind, facts])))
    with contextlib.suppress(ValueError):
        assert isinstance(read_started(str(path)), Started)


def test_a_job_whose_ranks_have_noted_something_is_found():
    notes = Notes()
    notes.note_attempt("phalanx run", "phalanx run x.py", "", 2)
    notes.note_start(0, os.getpid())
    Launch("phalanx run", notes.path, 0, 2, "", 0).note_progress()
    notes.note_end(Ending(rank=0, pid=os.getpid(), exitcode=-9))
    started = read_started(notes.path)
    notes.close()
    assert (started.pids, started.ended[0].signal, started.world_size) == ({0: os.getpid()}, 9, 2)


def test_a_job_below_a_process_that_records_for_itself_is_found(tmp_path):
    """A notebook that has trained, and then starts a job of its own."""
    script = """
import subprocess, sys
from phalanx.record import writer
writer.begin(0, 1)
environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29501"}
rank = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environ)
print(rank.pid, flush=True)
input()
rank.communicate(b"done\\n")
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, **pipes) as outer:
        pid = int(outer.stdout.readline())
        jobs = {find_job(str(of)).world_size: find_job(str(of)) for of in (pid, outer.pid)}
        outer.communicate("done\n", timeout=60)
    assert {size: [rank.pid for rank in job.ranks] for size, job in jobs.items()} == {2: [pid], 1: [outer.pid]}


def test_a_job_that_started_warm_is_found_by_the_process_that_was_typed(tmp_path):
    (tmp_path / "job.py").write_text("import signal; print('up', flush=True); signal.pause()")
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2", "job.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert [process.stdout.readline()[-3:] for _ in range(2)] == ["up\n"] * 2
            job = find_job(str(process.pid))
            assert (job.name, job.launcher, len(job.ranks)) == ("job.py", "phalanx run", 2)
            assert job.launcher_pid != process.pid, "it did not start warm"
        finally:
            process.terminate()


ALONE = "import os, signal; print(flush=True); signal.pause()"


@pytest.fixture
def twins(tmp_path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two jobs of one script by hand, each in a folder of its own."""
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    started = []
    for number in (1, 2):
        (tmp_path / f"run_{number}").mkdir()
        (tmp_path / f"run_{number}" / "twin.py").write_text(ALONE)
        started.append(
            subprocess.Popen(
                [sys.executable, "twin.py"],
                cwd=tmp_path / f"run_{number}",
                env={**os.environ, **environ, "MASTER_PORT": str(number)},
                stdout=subprocess.PIPE,
            )
        )
    for one in started:
        one.stdout.readline()
    yield started
    for one in started:
        one.kill()
        one.communicate()


def test_several_jobs_are_listed_with_what_tells_them_apart(twins, tmp_path):
    with pytest.raises(LookupError) as raised:
        find_job("twin.py")
    head, titles, *rows = str(raised.value).splitlines()
    pids = "|".join(str(one.pid) for one in twins)
    right = rf"several jobs 'twin\.py' of this user are running on this host; name one by its pid, such as ({pids}):"
    assert re.fullmatch(right, head)
    assert titles.split() == ["pid", "script", "folder", "started", "by", "since"]
    wanted = [[str(one.pid), "twin.py", f"run_{n}", "by", "hand"] for n, one in enumerate(twins, 1)]
    told = [row.split()[:5] for row in rows]
    assert sorted([pid, name, os.path.basename(folder), *by] for pid, name, folder, *by in told) == sorted(wanted)
    assert all(str(tmp_path).endswith(os.path.dirname(folder).removeprefix("...")) for _, _, folder, *_ in told)
    assert max(map(len, rows)) <= 80


def test_trace_says_which_ranks_record(twins, capsys):
    assert cli.main(["trace", str(twins[0].pid)]) == 1
    told = "records nothing: ranks of the backend phalanx do, and those of Gloo under phalanx run"
    assert capsys.readouterr().err == f"phalanx trace: twin.py (by hand) {told}\n"


def test_among_several_jobs_attach_is_told_its_flag(twins, monkeypatch):
    found = [dataclasses.replace(find_job(str(one.pid)), notes="notes", launcher_pid=one.pid) for one in twins]
    monkeypatch.setattr(jobs, "find_jobs", lambda: found)
    with pytest.raises(LookupError, match=f"; name one by its pid, such as --job {twins[-1].pid}:"):
        find_job("", has_notes=True)


def test_of_several_jobs_that_of_the_current_folder_is_meant(twins, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / "run_2")
    assert [rank.pid for rank in find_job("twin.py").ranks] == [twins[1].pid]


@pytest.mark.parametrize("written", ["{0}/run_2/twin.py", "../run_2/twin.py", "./twin.py"])
def test_a_path_means_that_file_alone(twins, tmp_path, monkeypatch, written):
    monkeypatch.chdir(tmp_path / "run_2" if written.startswith("./") else tmp_path / "run_1")
    assert [rank.pid for rank in find_job(written.format(tmp_path)).ranks] == [twins[1].pid]
    (tmp_path / "twin.py").touch()
    with pytest.raises(LookupError, match=r"no job '.*/twin\.py' of this user is running on this host"):
        find_job(f"{tmp_path}/twin.py")


def test_a_job_of_another_folder_is_taken_by_its_name_with_a_word(twins, tmp_path, monkeypatch, capsys):
    twins[0].kill()
    twins[0].wait()
    monkeypatch.chdir(tmp_path)
    where = f"of this folder is running; this is twin.py (pid {twins[1].pid}) in {tmp_path / 'run_2'}\n"
    assert cli.main(["top", "--once", "twin.py"]) == 0
    assert capsys.readouterr().err == f"phalanx top: no 'twin.py' {where}"
    assert cli.main(["stacks", "twin.py"]) == 0
    assert capsys.readouterr().err == f"phalanx stacks: no 'twin.py' {where}"
    assert cli.main(["trace", "twin.py"]) == 1
    assert f"phalanx trace: no 'twin.py' {where}" in capsys.readouterr().err
    found = [find_job(str(twins[1].pid))]
    monkeypatch.setattr(jobs, "find_jobs", lambda: found)
    assert cli.main(["stacks"]) == 0
    assert capsys.readouterr().err == f"phalanx stacks: no job {where}"
    found[0] = dataclasses.replace(found[0], notes="notes")
    assert cli.main(["attach", "0"]) == 1
    named, refused = capsys.readouterr().err.splitlines()
    assert named == f"phalanx attach: no job {where}".rstrip()
    assert "does not take" in refused


@pytest.mark.parametrize("written", ["twin.py", "{0}/twin.py"])
def test_the_run_of_this_folder_has_ended_while_jobs_of_the_name_run_elsewhere(twins, tmp_path, monkeypatch, written):
    (tmp_path / "twin.py").write_text("raise OSError('the run of this folder')")
    subprocess.run([sys.executable, "-m", "phalanx", "run", "twin.py"], cwd=tmp_path, capture_output=True, check=False)
    asked = [sys.executable, "-m", "phalanx", "why", written.format(tmp_path)]
    assert "the run of this folder" in subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True).stdout


@pytest.mark.parametrize("command", ["why", "trace"])
def test_without_a_name_the_last_run_of_this_folder_comes_before_a_job_of_another(
    twins, tmp_path, monkeypatch, capsys, command
):
    twins[0].kill()
    twins[0].wait()
    found = [find_job(str(twins[1].pid))]
    monkeypatch.setattr(jobs, "find_jobs", lambda: found)
    run = Path("logs/train/20260101-000000-1")
    (tmp_path / run / "attempt_0/rank_0").mkdir(parents=True)
    save(Recorded(2).boxes(5), tmp_path / run / "blackbox/attempt_0")
    monkeypatch.chdir(tmp_path)
    assert cli.main([command]) == 0
    elsewhere = f"twin.py (pid {twins[1].pid}) runs in {tmp_path / 'run_2'}"
    assert capsys.readouterr().err == (
        f"phalanx {command}: no job of this folder is running; this is its last run, {run}; {elsewhere}\n"
    )


def test_a_job_that_ends_after_it_was_found_is_not_taken_for_one_of_this_folder(twins, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / "run_1")
    here, elsewhere = (find_job(str(one.pid)) for one in twins)
    assert (here.is_elsewhere, elsewhere.is_elsewhere) == (False, True)
    twins[0].kill()
    os.waitid(os.P_PID, twins[0].pid, os.WEXITED | os.WNOWAIT)
    assert here.is_elsewhere
    twins[0].wait()
    assert here.is_elsewhere


def test_attach_lists_no_job_that_it_would_refuse(twins, capsys):
    assert attach(["0", "--job", "twin.py"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("phalanx attach: no job 'twin.py'")
    assert "by hand" not in said
