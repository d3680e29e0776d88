"""What phalanx why says of jobs that have ended, and what ranks ask by themselves while they wait."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx import cli
from phalanx.diagnose.stacks import find_py_spy
from phalanx.diagnose.subject import Run, last_run_of, record_of
from phalanx.diagnose.why.findings import conclude
from phalanx.diagnose.why.past import evidence_of
from phalanx.diagnose.why.why import main
from phalanx.diagnose.why.wording import sentence
from tests.diagnose.asked import asked
from tests.killed import kill_unseen
from tests.record.made import Job, save

pytestmark = pytest.mark.usefixtures("warm_jobs")

PHALANX = [sys.executable, "-m", "phalanx"]
RAISES = """
import torch, torch.distributed as dist
dist.init_process_group(BACKEND)
for number in range(9):
    if (dist.get_rank(), number) == (1, 3):
        raise ValueError("a bad batch")
    dist.all_reduce(torch.ones(2))
"""
KILLED = """
import os, signal, sys, torch, torch.distributed as dist
dist.init_process_group("phalanx")
dist.all_reduce(torch.ones(2))
if dist.get_rank() == 1:
    print("there", flush=True)
    signal.pause()
dist.all_reduce(torch.ones(2))
"""
LEAVES = """
import os, torch, torch.distributed as dist
dist.init_process_group("phalanx")
dist.all_reduce(torch.ones(2))
if dist.get_rank() == 1:
    work = dist.all_reduce(torch.ones(2), async_op=True)
    os._exit(0)
dist.all_reduce(torch.ones(2))
dist.all_reduce(torch.ones(2))
"""
WAITS = """
import threading, torch, torch.distributed as dist
from datetime import timedelta
from phalanx.backend.failures import answer
answer.ASK_WHY_S, answer.ANSWER_S = 0, LIMIT_S
dist.init_process_group("phalanx")
dist.all_reduce(torch.ones(2))
dist.group.WORLD.set_timeout(timedelta(seconds=8))
if dist.get_rank() == 1:
    threading.Event().wait()
dist.all_reduce(torch.ones(2))
"""


@contextlib.contextmanager
def waiting_job(folder, num_ranks):
    """A job of which rank 1 waits for ever and the others for it."""
    (folder / "job.py").write_text(KILLED)
    command = [*PHALANX, "run", "--nproc-per-node", str(num_ranks), "job.py"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        while "there" not in process.stdout.readline():
            assert process.poll() is None
        yield process


def run(folder: Path, script: str, num_ranks: int = 3, **environ: str) -> subprocess.CompletedProcess[str]:
    (folder / "job.py").write_text(script)
    return subprocess.run(
        [*PHALANX, "run", "--nproc-per-node", str(num_ranks), "job.py"],
        cwd=folder, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **environ},
    )  # fmt: skip


def why(folder: Path, *args: object) -> list[str]:
    done = asked(folder, "why", *args)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


LATE = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("phalanx", timeout=timedelta(seconds=2))
dist.all_reduce(torch.ones(2))
if dist.get_rank() == 1:
    import threading
    threading.Event().wait()
dist.all_reduce(torch.ones(2))
"""


def test_a_wait_that_timed_out_has_lasted_until_then_and_its_error_is_named(tmp_path):
    assert run(tmp_path, LATE).returncode == 1
    _, answer, *more = why(tmp_path, "logs/job")
    waited = re.search(
        r"^rank 1 had not begun all_reduce #2 .*; 2 ranks waited up to (\S+) s for it, and raised (\S+)$", answer
    )
    assert waited, answer
    assert 2 <= float(waited[1]) < 10
    assert waited[2] == "CollectiveTimeout"
    each = re.findall(r" for (\S+) s, and raised CollectiveTimeout$", "\n".join(more), re.MULTILINE)
    assert each
    assert all(2 <= float(one_s) <= float(waited[1]) for one_s in each)
    assert why(tmp_path, "logs/job", "--brief") == [answer]


def test_what_ended_the_launcher_is_told_of_a_run_that_no_rank_ended(tmp_path):
    with waiting_job(tmp_path, 2) as process:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    (folder,) = tmp_path.glob("logs/job/*")
    assert why(tmp_path, folder)[0] == f"{folder} has ended: phalanx run got SIGTERM. When it did:"


def test_after_ctrl_c_on_a_young_hang_it_is_known_who_was_missing_and_at_which_line(tmp_path):
    with waiting_job(tmp_path, 2) as process:
        (folder,) = tmp_path.glob("logs/job/*")
        while "; 1 rank has waited " not in why(tmp_path, folder)[0]:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    first, answer, *_ = why(tmp_path, folder)
    assert first.endswith("has ended: phalanx run got SIGINT. When it did:")
    assert re.fullmatch(
        r"rank 1 had not begun all_reduce #2 of group 'default'; it was interrupted at job\.py:7; "
        r"1 rank waited [\d.]+ s for it",
        answer,
    )


RING = """
import torch, phalanx, torch.distributed as dist
dist.init_process_group("phalanx")
dist.recv(torch.zeros(4), src=1 - dist.get_rank())
"""
JOINS = """
import os, signal, phalanx, torch.distributed as dist
if os.environ["RANK"] == "1":
    signal.pause()
dist.init_process_group("phalanx")
"""


@pytest.mark.parametrize(
    ("script", "live", "after"),
    [
        (
            RING,
            "ranks 0 and 1 wait for each other's messages",
            r"ranks 0 and 1 waited for each other's messages: rank 0 waited in recv from rank 1 of group 'default' at "
            r"job\.py:4; rank 1 waited in recv from rank 0 .*",
        ),
        (
            JOINS,
            "rank 1 has not called init_process_group at job.py:5; it has been in <module> at job.py:4",
            r"rank 1 had not begun init_process_group at job\.py:5; it was interrupted at job\.py:4; "
            r"1 rank waited for it",
        ),
    ],
)
def test_a_rank_that_ctrl_c_interrupts_in_a_message_or_while_it_joins_was_waiting(tmp_path, script, live, after):
    (tmp_path / "job.py").write_text(script)
    with subprocess.Popen([*PHALANX, "run", "--nproc-per-node", "2", "job.py"], cwd=tmp_path) as process:
        while live not in printed(tmp_path, "why", "job.py", "--brief"):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert re.fullmatch(after, why(tmp_path, "job.py", "--brief")[0])


LEFT_OUT = """
import torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("phalanx")
dist.all_reduce(torch.ones(2))
if dist.get_rank() != 1:
    dist.new_group(timeout=timedelta(seconds=2))
"""
ALL_CALL = "every rank must call new_group, in the same order, member or not"


@pytest.mark.parametrize(
    ("then", "answer"),
    [
        (
            "",
            r"rank 1 had not begun new_group at job\.py:7; it ended with exit code 0 .*; "
            r"2 ranks waited for it(, and raised RankFailed)?",
        ),
        (
            "dist.all_reduce(torch.ones(2))",
            r"rank 1 waited in all_reduce #2 of group 'default' at job\.py:8, "
            r"while ranks 0 and 2 waited in new_group at job\.py:7",
        ),
    ],
)
def test_a_new_group_that_a_rank_left_out_is_named_with_its_line(tmp_path, then, answer):
    assert run(tmp_path, LEFT_OUT + then).returncode == 1
    assert re.fullmatch(f"{answer}: {ALL_CALL}", why(tmp_path, "job.py", "--brief")[0])


def test_a_new_group_that_a_rank_of_a_running_job_leaves_out_is_named(tmp_path):
    script = LEFT_OUT.replace("seconds=2", "seconds=600") + "else:\n    __import__('signal').pause()\n"
    (tmp_path / "job.py").write_text(script)
    with subprocess.Popen([*PHALANX, "run", "--nproc-per-node", "3", "job.py"], cwd=tmp_path) as process:
        wanted = "rank 1 has not called new_group at job.py:7; it has been "  # not while it leaves init_process_group
        while not (said := printed(tmp_path, "why", "job.py", "--brief")).startswith(wanted):
            assert process.poll() is None
        process.terminate()
    assert said.endswith(f": {ALL_CALL}\n")


def test_a_rank_that_left_while_its_own_call_was_about_to_begin_is_not_said_not_to_have_called_it(tmp_path):
    run(tmp_path, LEAVES)
    (folder,) = tmp_path.glob("logs/job/*")
    answer = why(tmp_path, folder)[1]
    assert "rank 1 " in answer
    assert "not called" not in answer


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_of_a_run_that_failed_the_rank_and_its_exception_are_named(tmp_path, backend):
    assert run(tmp_path, RAISES.replace("BACKEND", repr(backend))).returncode == 1
    (folder,) = tmp_path.glob("logs/job/*")
    title, answer, *_ = why(tmp_path, folder)
    assert title == f"{folder} has ended. When it did:"
    assert answer.startswith("rank 1 raised ValueError: a bad batch at job.py:6")
    if backend == "phalanx":
        # A rank that is told to end in time raises nothing.
        ends = r"; 2 ranks waited for it(, and raised RankFailed)? in all_reduce #4 of group 'default' at job\.py:7$"
        assert re.search(ends, answer)


def test_of_a_run_that_ended_long_ago_it_is_said_when_and_that_torchruns_leave_no_record(tmp_path):
    run(tmp_path, "raise OSError('an old one')", num_ranks=1)
    (folder,) = tmp_path.glob("logs/job/*")
    then = time.time() - 750
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (then, then))
    by_name, by_folder = why(tmp_path, "job.py"), why(tmp_path, folder)
    assert re.fullmatch(r"logs/job/\S+ has ended, 1[23] min \d+ s ago\. When it did:", by_name[0])
    assert (
        by_name[2] == "A job that phalanx run has not started, such as one of torchrun, leaves no record when it ends."
    )
    assert " min " in by_folder[0]
    assert not any("leaves no record" in line for line in by_folder)


def test_a_rank_that_was_ended_when_its_wait_just_had_is_told_as_waiting(tmp_path):
    caught = "try: dist.all_reduce(torch.ones(2))\n    except Exception: signal.sigwait([signal.SIGTERM]); os._exit(1)"
    script = RAISES.replace("BACKEND", "'phalanx'").replace("dist.all_reduce(torch.ones(2))", caught)
    script = f"import os, signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n{script}"
    assert run(tmp_path, script).returncode == 1
    answer = why(tmp_path, *tmp_path.glob("logs/job/*"))[1]
    assert re.search(r"a bad batch at .*; 2 ranks waited for it in all_reduce #4 of group 'default' at job.py", answer)


def test_a_run_that_came_to_its_end_is_no_hang(tmp_path):
    assert run(tmp_path, RAISES.replace("BACKEND", "'phalanx'").replace("(1, 3)", "(1, 30)")).returncode == 0
    (folder,) = tmp_path.glob("logs/job/*")
    (_, answer, _, ranks, *_) = why(tmp_path, folder)
    assert answer == "nothing went wrong: ranks 0, 1 and 2 ended with exit code 0"
    assert ranks.startswith("ranks 0, 1 and 2 (pids ")
    assert ": each ended with exit code 0 after all_reduce #9 of group 'default' at job.py:7" in ranks
    (folder / "blackbox" / "attempt_0" / "ends.json").write_text("[]")
    assert why(tmp_path, folder)[1].startswith("no wait for another rank is on record; each last called all_reduce #9")


def test_a_rank_that_left_without_a_word_is_named_with_its_exit_code(tmp_path):
    script = RAISES.replace("BACKEND", "'phalanx'").replace(
        'raise ValueError("a bad batch")', "__import__('os')._exit(7)"
    )
    assert run(tmp_path, script).returncode == 7
    (folder,) = tmp_path.glob("logs/job/*")
    assert why(tmp_path, folder)[1].startswith("rank 1 ended with exit code 7 after all_reduce #3 of group 'default'")


def test_a_rank_whose_native_code_crashed_is_named_with_its_line(tmp_path):
    run(
        tmp_path,
        RAISES.replace("BACKEND", "'phalanx'").replace("raise ValueError", "__import__('ctypes').string_at(0)#"),
    )
    said = why(tmp_path, *tmp_path.glob("logs/job/*"))[1]
    # One waited if the other had not called it yet. "and raised RankFailed" stands where they were not ended first.
    waited = r"(1 rank|2 ranks) waited for it.* in all_reduce #4"
    assert re.match(rf"rank 1 was killed by SIGSEGV at job\.py:6; {waited}", said), said


def test_ranks_that_called_different_collectives_are_told_with_their_lines(tmp_path):
    run(tmp_path, RAISES.replace("BACKEND", "'phalanx'").replace('raise ValueError("a bad batch")', "dist.barrier()"))
    what = "the ranks of this group called different collectives"
    named = [
        f"{ranks} in {op} #4 of group 'default' at job.py:{line}"
        for ranks, op, line in (("ranks 0 and 2", "all_reduce", 7), ("rank 1", "barrier", 6))
    ]
    _, answer, *proof = why(tmp_path, *tmp_path.glob("logs/job/*"))
    assert answer == f"ranks 0, 1 and 2 raised phalanx.CollectiveMismatch: {'; '.join(named)}: {what}"
    assert what not in "".join(proof), "it is said once"


def test_of_a_job_whose_processes_were_all_killed_it_is_known_who_was_missing(cold_jobs, tmp_path):
    with waiting_job(tmp_path, 3) as process:
        (folder,) = tmp_path.glob("logs/job/*")
        while "; 2 ranks have waited up to " not in why(tmp_path, folder)[0]:  # until they do
            assert process.poll() is None
        assert "has not called all_reduce #2 of group 'default'" in why(tmp_path, folder)[0]
        named = re.findall(r"\(pids? ([\d, ]+)\)", "\n".join(why(tmp_path, folder)))
        kill_unseen(process, [int(pid) for pids in named for pid in pids.split(", ")])
        process.wait(60)
    _, answer, *_ = why(tmp_path, folder)
    assert re.fullmatch(
        r"ranks 0, 1 and 2 were killed by SIGKILL: rank 1 had not begun all_reduce #2 of group 'default'; "
        r"it last called all_reduce #1 of group 'default' at job\.py:4; 2 ranks waited up to [\d.]+ s for it",
        answer,
    )


def test_a_run_is_found_by_its_script_and_nothing_is_claimed_of_ranks_that_left_no_record(tmp_path):
    run(tmp_path, RAISES.replace("BACKEND", "'phalanx'"))
    (folder,) = tmp_path.glob("logs/job/*")
    for name in ("job.py", folder.parent, folder.parent.parent):
        assert why(tmp_path, name)[1].startswith("rank 1 raised ValueError: a bad batch")
    shutil.rmtree(folder / "blackbox")
    for path in folder.glob("attempt_0/*/*"):
        path.unlink()
    (line,) = why(tmp_path, tmp_path / "logs")
    assert line == (
        f"{folder} has ended without a record: phalanx run itself was probably killed. Its logs are in {folder}."
    )
    (folder / "blackbox" / "attempt_0").mkdir(parents=True)
    (line,) = why(tmp_path, "--brief", folder)
    assert line == "it ended without a record: it could not be written, as on a full disk"


def test_a_name_that_would_control_a_terminal_is_escaped_wherever_it_is_shown(tmp_path):
    name = "a\x1b[31m\n.py"
    script = RAISES.replace("BACKEND", "'phalanx'").replace("(1, 3)", "(0, 3)").replace("raise ValueError", "input")
    (tmp_path / name).write_text(script)
    command = [*PHALANX, "run", "--nproc-per-node", "2", name]
    environment, printing = {**os.environ, "PHALANX_STALL_S": "0.5"}, tmp_path / "said"
    with open(printing, "w") as out:
        options = {"cwd": tmp_path, "stdin": subprocess.PIPE, "stdout": out, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, text=True, env=environment, **options) as process:
            while "waiting" not in (top := printed(tmp_path, "top", "--once", name)):
                assert process.poll() is None, printing.read_text()
            deadline = time.monotonic() + 60
            while "a\\x1b[31m\\n.py:" not in printing.read_text() and time.monotonic() < deadline:  # its own word
                time.sleep(0.01)
            process.communicate("\n", timeout=60)
    said = printing.read_text()
    assert "a\\x1b[31m\\n.py:" in top + said
    assert "\x1b" not in top + said
    assert "a\\x1b[31m\\n.py:" in said


def printed(folder, *command):
    done = asked(folder, *command)
    return done.stdout + done.stderr


def test_a_torn_box_of_a_run_is_named_and_the_others_are_read(tmp_path):
    run(tmp_path, RAISES.replace("BACKEND", "'phalanx'"))
    (torn,) = tmp_path.glob("logs/job/*/blackbox/attempt_0/rank_0.box")
    torn.write_bytes(torn.read_bytes()[:-9])
    lines = why(tmp_path, torn.parents[2])
    assert lines[1].startswith("rank 1 raised ValueError: a bad batch")
    assert f"  {torn} can't be read" in "\n".join(lines)


def test_a_copy_of_a_box_in_the_place_of_another_is_named_for_that_rank(tmp_path):
    folder = tmp_path / "logs/job/20260101-000000-1"
    boxes = folder / "blackbox/attempt_0"
    save(Job(3).boxes(60), boxes)
    for rank in range(3):
        (folder / f"attempt_0/rank_{rank}").mkdir(parents=True)
    shutil.copy(boxes / "rank_0.box", boxes / "rank_2.box")
    shutil.copy(boxes / "rank_0.box", boxes / "rank_0 (copy).box")
    evidence = left_by(folder)
    assert "rank 0 last called all_reduce #60" in sentence_of(evidence)
    problem = f"{boxes / 'rank_2.box'} holds the black box of rank 0, as rank_0.box does: delete the copy"
    assert evidence.seen[2].look.box_problem == problem


def test_of_a_trainer_s_records_no_more_is_read_than_up_to_its_last_start(tmp_path):
    folder = tmp_path / "logs/job/20260101-000000-1"
    (folder / "attempt_0/rank_0").mkdir(parents=True)
    start = '{"kind": "start", "origin": {"logs": "%s", "hosts": "here"}}\n'
    with open(tmp_path / "metrics.jsonl", "w") as file:
        file.write(start % "elsewhere")
        file.seek(1 << 36)  # a hole, which nobody could read
        file.write("\n" + start % "logs/job/20260101-000000-1" + '{"kind": "step"}\n' * 50_000)
    assert record_of(tmp_path) == folder


def test_a_trainer_s_folder_without_a_start_stands_for_the_runs_of_its_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/job/checkpoints").mkdir(parents=True)
    assert record_of(Path("runs/job")) == Path("runs/job")
    run = Path("logs/job/20260101-000000-1")
    (run / "attempt_0/rank_0").mkdir(parents=True)
    save(Job(2).boxes(5), run / "blackbox/attempt_0")
    assert (record_of(Path("runs/job")), record_of(Path("runs"))) == (run.parent, run.parent.parent)
    assert record_of(tmp_path / "runs/job") == tmp_path / run.parent
    assert [last_run_of(name) for name in ("", "job.py", "logs", "logs/job")] == [run] * 4
    asked_for = Path("runs/20260101-000000-2")  # with --log-dir runs
    (asked_for / "attempt_0/rank_0").mkdir(parents=True)
    assert (record_of(Path("runs")), record_of(asked_for)) == (Path("runs"), asked_for)


def test_of_several_trainers_folders_the_newest_is_taken_and_named(tmp_path):
    for number, name in enumerate(("a", "b"), 1):
        run = tmp_path / f"logs/job/20260101-000000-{number}"
        (run / "attempt_0/rank_0").mkdir(parents=True)
        save(Job(2).boxes(5), run / "blackbox/attempt_0")
        record = tmp_path / f"runs/{name}/metrics.jsonl"
        record.parent.mkdir(parents=True)
        logs = f"../../logs/job/{run.name}"
        record.write_text(f'{{"kind": "start", "origin": {{"logs": "{logs}", "hosts": "here"}}}}\n')
        os.utime(record, (9 - number, 9 - number))
    for command in ("why", "trace"):
        done = asked(tmp_path, command, "runs")
        assert done.stderr == f"phalanx {command}: 'runs' holds 2 runs; this is the newest, runs/a\n"
    assert "logs/job/20260101-000000-1 has ended" in asked(tmp_path, "why", "runs").stdout


def test_a_run_in_which_every_file_is_damaged_is_told_without_them(tmp_path):
    folder = tmp_path / "logs/job/20260101-000000-1"
    save(Job(2).boxes(60), folder / "blackbox/attempt_0")
    for rank in range(2):
        (folder / f"attempt_0/rank_{rank}").mkdir(parents=True)
    deep = "[" * 100_000
    (folder / "blackbox/attempt_0/ends.json").write_text(deep)
    (folder / "attempt_0/rank_0/error.json").write_text(deep)
    os.mkfifo(folder / "attempt_0/rank_0/stderr.log")
    (folder / "blackbox/attempt_0/rank_1.box").unlink()
    (folder / "blackbox/attempt_0/rank_1.box").symlink_to("/dev/zero")
    answer = sentence_of(left_by(folder))
    assert "rank 0 last called all_reduce #60 of group 'world' at train.py:31" in answer
    assert "rank 1 left a record that can't be read" in answer


def damaged_run(folder):
    """A run of three ranks; the third box and a note go on behind their ends, for 30 GB that no disk holds."""
    boxes = folder / "blackbox/attempt_0"
    save(Job(3).boxes(60), boxes)
    for rank in range(3):
        (folder / f"attempt_0/rank_{rank}").mkdir(parents=True)
    (boxes / "ends.json").write_text("{}")
    for long in ("rank_2.box", "ends.json"):
        os.truncate(boxes / long, 30 << 30)
    return boxes


def test_of_files_that_are_too_large_to_be_ours_the_beginning_alone_is_read(tmp_path, monkeypatch, capsys):
    boxes = damaged_run(tmp_path / "logs/job/20260101-000000-1")
    evidence = left_by(boxes.parents[1])
    assert [one.look.box is not None for one in evidence.seen] == [True, True, False]
    assert evidence.seen[2].look.box_problem == f"{boxes / 'rank_2.box'} can't be read: it is larger than a black box"
    monkeypatch.chdir(tmp_path)
    assert cli.main(["trace", str(boxes)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("trace.json.gz: 2 ranks, ")
    assert said.err == f"phalanx trace: {evidence.seen[2].look.box_problem}; the trace lacks it\n"


def test_a_box_tells_its_rank_and_not_the_name_of_its_file(tmp_path):
    boxes = damaged_run(tmp_path / "logs/job/20260101-000000-1")
    before = left_by(boxes.parents[1])
    (boxes / "rank_0.box").rename(boxes / "rank_7.box")
    (boxes / "rank_1.box").rename(boxes / "rank_0.box")
    assert [one.look.box for one in left_by(boxes.parents[1]).seen] == [one.look.box for one in before.seen]


def left_by(folder):
    return evidence_of(Run(folder, is_newest=False))


def sentence_of(evidence):
    return sentence(conclude(evidence), evidence.doings)


def test_where_no_job_runs_the_youngest_run_is_told_or_nothing_is_there(tmp_path):
    done = subprocess.run(
        [*PHALANX, "why", "no_such.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("phalanx why: no job 'no_such.py' of this user is running on this host")
    assert done.stderr.endswith("\nThere is no run in 'logs/no_such' either.\n")


@pytest.mark.parametrize("command", ["why", "trace"])
def test_a_folder_that_is_not_there_holds_no_run_and_other_jobs_are_not_listed(tmp_path, command):
    words = [*PHALANX, command, "logs/no_such"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == f"phalanx {command}: there is no run in 'logs/no_such', and no such folder\n"


TRAINS = """
import torch, phalanx
class Raises:
    def on_step(self, trainer):
        raise ValueError("a bad step")
model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.ones(8, 4), torch.zeros(8, 1))
phalanx.Trainer(
    model, torch.optim.SGD(model.parameters(), 0.1), torch.nn.functional.mse_loss, max_epochs=1, global_batch_size=4,
    folder="runs/long", callbacks=(Raises(),),
).fit(data)
"""


def test_the_folder_of_a_trainer_stands_for_the_run_that_trained_in_it(tmp_path):
    assert run(tmp_path, TRAINS, 2).returncode == 1
    (folder,) = tmp_path.glob("logs/job/*")
    assert why(tmp_path, "runs/long") == why(tmp_path, f"logs/job/{folder.name}")
    assert os.listdir(tmp_path / "runs") == ["long"], "checkpoints and a launcher's records lie apart"
    assert "out.json: 2 ranks, " in printed(tmp_path, "trace", "runs/long", "--out", "out.json")
    shutil.rmtree(folder)  # as on a host that shares the Trainer's folder alone
    done = asked(tmp_path, "why", "runs/long")
    assert done.returncode == 2
    assert re.fullmatch(
        r"phalanx why: the job that trained in 'runs/long' ran on '\S+'; ask there: it left no record here\n",
        done.stderr,
    )


@pytest.mark.parametrize("one_runs_elsewhere", [False, True])
def test_of_a_script_whose_last_run_left_no_record_the_one_beside_it_is_told(tmp_path, one_runs_elsewhere):
    with contextlib.ExitStack() as stack:
        if one_runs_elsewhere:
            (elsewhere := tmp_path / "elsewhere").mkdir()
            process = stack.enter_context(waiting_job(elsewhere, 2))
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
        check_that_the_one_beside_it_is_told(tmp_path)


def check_that_the_one_beside_it_is_told(tmp_path):
    assert run(tmp_path, RAISES.replace("BACKEND", '"phalanx"')).returncode == 1
    (folder,) = tmp_path.glob("logs/job/*")
    killed = folder.with_name("99991231-235959-1")  # of a launcher that was killed with its host
    (killed / "attempt_0" / "rank_3").mkdir(parents=True)
    assert why(tmp_path, "job.py")[0].startswith(f"{killed.relative_to(tmp_path)} has ended without a record: ")
    (folder / "blackbox" / "attempt_0" / "ends.json").touch()
    os.utime(folder / "blackbox" / "attempt_0")  # what it saved lies behind the other's beginning
    head, answer, *_ = why(tmp_path, "job.py")
    name = killed.relative_to(tmp_path)
    own = folder.relative_to(tmp_path)
    assert (
        head
        == f"{own} has ended: {name}, which began last, left no record; this one ran at the same time. When it did:"
    )
    assert "ValueError: a bad batch" in answer


@pytest.mark.slow
@pytest.mark.skipif(not find_py_spy(), reason="py-spy is not installed")
def test_a_rank_that_waits_asks_by_itself_and_its_timeout_tells_the_answer(tmp_path):
    done = run(tmp_path, WAITS.replace("LIMIT_S", "20"), 2, PHALANX_STALL_S="0.5")
    sentence = (
        r"phalanx why: rank 1 has not called all_reduce #2 of group 'default'; it has been in <module> at job\.py:10"
    )
    assert len(re.findall(rf"^\[rank 0\] {sentence}", done.stdout + done.stderr, re.MULTILINE)) == 1
    later = r"  Pass a larger timeout .* \(phalanx explain timeout\)"
    assert re.search(rf"CollectiveTimeout: rank 0: .*\n(.*\n)+{later}\n  {sentence}", done.stderr), done.stderr
    (folder,) = tmp_path.glob("logs/job/*")
    _, answer, asked, *_ = why(tmp_path, folder)
    assert answer.startswith("rank 1 had not begun all_reduce #2 of group 'default'; it last called ")
    assert re.match(sentence.replace("phalanx why", "While it ran"), asked)


def test_an_answer_that_does_not_come_delays_nothing_and_breaks_nothing(tmp_path):
    done = run(tmp_path, WAITS.replace("LIMIT_S", "0.01").replace("seconds=8", "seconds=2"), 2, PHALANX_STALL_S="0.5")
    assert "phalanx why" not in done.stdout + done.stderr
    assert "CollectiveTimeout: rank 0: all_reduce #2 of group 'default'" in done.stderr
    assert "timed out after 2.0 s waiting for rank 1" in done.stderr


@pytest.mark.parametrize("num_letters", [300, 5000])  # more than a name may have, and than a path may
def test_a_name_that_no_file_can_have_is_no_job(num_letters, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["a" * num_letters]) == 2
    assert "phalanx why: no job 'aaa" in capsys.readouterr().err
