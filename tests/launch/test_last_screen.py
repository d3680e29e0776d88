"""What a user sees last when a job fails: the cause once, on one screen, with advice that is right."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
import torch

from phalanx.failure.ending import Ending, last_words_in
from phalanx.failure.folding import COLUMNS, ROWS, fold
from phalanx.failure.hints import hint_for
from phalanx.failure.last_words import LastWords
from phalanx.failure.report import report
from phalanx.launch.command.flag_parser import hint_for_flags
from tests.launch import mistakes
from tests.launch.jobs import LIMIT_S, PHALANX_RUN

pytestmark = pytest.mark.usefixtures("warm_jobs")

NAMES = [mistake.__name__ for mistake in mistakes.MISTAKES]
COMMAND = ("python", "mistakes.py")


def num_rows(text):
    return sum(max(1, -(-len(line) // COLUMNS)) for line in text.splitlines())


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """One job that makes one mistake after another: what was on its screen, and the folder of its logs."""
    folder = tmp_path_factory.mktemp("job")
    flags = ["--nproc-per-node", "2", "--shutdown-timeout", "5", "--max-restarts", str(len(NAMES) - 1)]
    done = subprocess.run(
        [*PHALANX_RUN, *flags, mistakes.__file__],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=6 * LIMIT_S,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""} if torch.cuda.is_available() else None,
    )
    (logs,) = folder.glob("logs/mistakes/*/")
    return done, logs


def end_of(logs, name, rank=None, returncode=1):
    """Return the end of the rank that raised in this attempt, as the supervisor records it."""
    attempt = logs / f"attempt_{NAMES.index(name)}"
    ends = []
    for number in (0, 1):
        folder = attempt / f"rank_{number}"
        pid = json.loads((folder / "error.json").read_text())["pid"] if (folder / "error.json").exists() else 4711
        words = last_words_in(str(folder), pid, (folder / "stderr.log").read_bytes())
        code = 1 if words.kind and returncode == 1 else 0 if returncode == 1 else returncode
        ends.append(Ending(rank=number, pid=pid, exitcode=code, last_words=words, folder="logs"))
    ends.sort(key=lambda end: (not end.last_words.kind, end.is_victim, end.rank))
    return (ends[0] if rank is None else next(end for end in ends if end.rank == rank)), ends


def screen_of(logs, name, **options):
    culprit, ends = end_of(logs, name, **options)
    return report(culprit, ends, hint=hint_for(culprit, ends, command=COMMAND))


@pytest.mark.parametrize("name", NAMES)
def test_each_usual_mistake_fits_on_one_screen(job, name):
    shown = screen_of(job[1], name)
    assert num_rows(shown) < ROWS, shown
    assert "site-packages" not in shown
    assert "[rank" not in shown
    assert "frame #" not in shown
    if name != "exit_with_words" and "kill" not in name:
        assert 'mistakes.py", line ' in shown or "mistakes.py:" in shown, shown


@pytest.mark.parametrize("name", NAMES)
def test_no_advice_is_given_twice(job, name):
    shown = screen_of(job[1], name)
    message = " ".join(line for line in shown.splitlines() if not line.startswith("    "))  # without frames
    words = re.findall(r"[\w.'=()]+", message)
    phrases = [" ".join(words[start : start + 5]) for start in range(len(words) - 4)]
    assert not {phrase for phrase in phrases if phrases.count(phrase) > 1}, shown


def test_code_that_python_has_generated_is_no_frame_of_the_users(job):
    shown = screen_of(job[1], "fail_in_generated_code")
    assert "<string>" not in shown
    assert "(1 frame of Python folded)" in shown
    command = ["Traceback (most recent call last):", '  File "<string>", line 1, in <module>', "ValueError: no"]
    assert fold(command, 9) == command[1:]  # python -c


def test_the_whole_screen_has_each_cause_once(job):
    done, _ = job
    assert "Traceback (most recent call last):\n" not in done.stderr.replace("Original Traceback", "")
    assert "[rank0]" not in done.stderr
    assert done.stderr.count("ValueError: bad learning rate") == 1
    assert "[all ranks] " in done.stderr
    assert len(re.findall(r"^\[.*: UserWarning: printed by all ranks", done.stderr, re.M)) == len(NAMES)
    for said in re.split(r"^phalanx run: restart \d+ of \d+$", done.stderr, flags=re.M)[1:]:
        assert num_rows(said) <= ROWS, said


HINTS = [
    ("name_device_ids_on_a_cpu", "on a CPU leave device_ids and output_device out"),
    ("name_device_ids_to_ours", "leave it out on a CPU"),
    ("use_torchs_syncbatchnorm", "phalanx.convert_sync_batchnorm(model)"),
    ("use_nccl", 'on a CPU: init_process_group("phalanx")'),
    ("name_an_unknown_backend", 'torch knows no backend of that name: init_process_group("phalanx"), or "gloo"'),
    ("set_a_gpu", "torch finds no GPU here"),
    ("move_to_a_gpu", "torch finds no GPU here"),
    ("have_fewer_batches", "give every rank equally many batches"),
    ("call_on_one_rank", "look for one under a condition that only some ranks meet (if rank == 0), or give every"),
    ("call_gloo_on_one_rank", "a condition that only some ranks meet (if rank == 0)"),
    ("lose_a_worker", "fewer DataLoader workers, or a smaller batch"),
    ("read_input", "only the first rank has the terminal"),
    ("stop_at_a_breakpoint", "call phalanx.breakpoint() on every rank instead"),
    ("name_an_empty_world", "takes rank and world size from the launcher"),
    ("import_what_is_missing", "python -m pip install no_such_package"),
    ("pickle_a_lambda", "no lambdas, open files or local functions"),
    ("give_a_negative_timeout", "must be more than 0 s"),
    ("forget_to_init", "call phalanx.init()"),
    ("load_a_wrapped_state", "load into model.module"),
    ("give_gloo_other_sizes", "tensors of different sizes"),
    ("reduce_float8", "can't be reduced (ReduceOp.SUM), only sent and copied; convert the tensor: tensor.float()"),
    ("give_other_sizes", "called all_reduce with different sizes"),
]


@pytest.mark.parametrize(("name", "advice"), HINTS)
def test_the_advice_is_right(job, name, advice):
    shown = screen_of(job[1], name)
    assert advice in shown, shown


def test_errors_about_arguments_name_the_users_line(job):
    for name in ("give_a_wrong_list", "name_a_wrong_root", "reduce_float8"):
        words = end_of(job[1], name)[0].last_words
        if words.kind == "ValueError" and words.message.startswith("rank "):
            assert re.match(r"rank \d: \w+ at \S*mistakes\.py:\d+", words.message), words.message
    assert end_of(job[1], "give_a_wrong_list")[0].last_words.message.startswith("rank 0: all_gather at ")


def test_a_rank_that_knows_no_more_is_not_the_cause(job):
    culprit, _ = end_of(job[1], "receive_another_size")
    assert culprit.rank == 1
    assert "does not fit" in culprit.last_words.message or "expects 32 bytes" in culprit.last_words.message


def test_a_job_ends_with_its_victims_on_one_line():
    dead = Ending(rank=3, pid=10, exitcode=-signal.SIGKILL, folder="logs")
    gone = LastWords("phalanx.RankFailed", "rank 0: all_reduce #4: rank 3 (pid 10) was killed", ())
    ends = [Ending(rank=rank, pid=rank + 11, exitcode=1, last_words=gone, when_s=1.0) for rank in (0, 1, 2, 4, 5)]
    asked = [Ending(rank=rank, pid=rank + 11, exitcode=-15, ended_by_us=True) for rank in (6, 7)]
    assert report(dead, [dead, *ends, *asked], hint="") == (
        "phalanx run: rank 3 (pid 10) was killed by SIGKILL; exit code 137 (phalanx explain exit-137)\n"
        "  ranks 0-2, 4 and 5: RankFailed, because of it\n"
        "  ranks 6 and 7: ended because of it\n"
        "  log: logs/stderr.log\n"
    )


def test_a_module_that_lies_elsewhere_is_found(tmp_path, monkeypatch):
    (tmp_path / "src").mkdir()
    (tmp_path / "helpers.py").touch()
    monkeypatch.chdir(tmp_path)
    words = LastWords(
        "ModuleNotFoundError", "No module named 'helpers'", ("ModuleNotFoundError: No module named 'helpers'",)
    )
    end = Ending(rank=0, pid=1, exitcode=1, last_words=words)
    hint = hint_for(end, command=("python", "src/train.py"))
    assert hint == f"'helpers' is in {tmp_path}, which is not on Python's path: PYTHONPATH={tmp_path} phalanx run ..."


def test_a_flag_of_ours_behind_the_script_is_put_before_it(tmp_path):
    said = "train.py: error: unrecognized arguments: --max_restarts=3 --nproc-per-node 2"
    args = ["--lr", "3", "--max_restarts=3", "--nproc-per-node", "2"]
    for given, target in (
        ("--no-pin", ["train.py"]),
        ("--no-pin", ["--", "train.py"]),
        ("--no-pin -m", ["package.train"]),
    ):
        command = ["python", *(["-m"] if "-m" in given else []), target[-1], *args]
        assert hint_for_flags(said, command, shlex.join(["phalanx", "run", *given.split(), *target, *args])) == (
            f"--max_restarts is a flag of phalanx run, and stands before the script: phalanx run {given} "
            f"--max_restarts=3 --nproc-per-node 2 {target[-1]} --lr 3"
        )
    typed = shlex.join(["phalanx", "run", "--no-pin", "--no-python", "python", "train.py", *args])
    assert hint_for_flags(said, ["python", "train.py", *args], typed).endswith(
        ": phalanx run --no-pin --max_restarts=3 --nproc-per-node 2 --no-python python train.py --lr 3"
    )
    assert hint_for_flags(said, ["python", "train.py", "--verbosity"], "phalanx run train.py --verbosity") == ""
    (tmp_path / "train.py").write_text("import argparse; argparse.ArgumentParser().parse_args()")
    command = [*PHALANX_RUN, "--nproc-per-node", "1", "train.py", "--max-restarts", "3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert "hint: --max-restarts is a flag of phalanx run, and stands before the script: phalanx run" in done.stderr


def test_what_another_rank_said_is_not_cut_in_mid_sentence():
    said = "send of group 'default' at big.py:9: rank 0 (pid 10) has reached its deadline and ended the group"
    words = LastWords("RuntimeError", f"rank 1: {said}", is_told=True)
    first = Ending(rank=0, pid=10, exitcode=1, last_words=LastWords("ValueError", "no", is_told=True))
    second = Ending(rank=1, pid=11, exitcode=1, last_words=words)
    assert f"\n  rank 1: RuntimeError: {said}\n" in report(first, [first, second], hint="")
    words = LastWords("ValueError", "word " * 100, is_told=True)
    outcomes = [first, *(Ending(rank=n, pid=n, exitcode=1, last_words=words) for n in (1,))]
    lines = report(first, outcomes, hint="").splitlines()
    assert any(line.startswith("  rank 1: ValueError: word") and line.endswith("...") for line in lines)
    assert max(map(len, lines)) <= 2 * COLUMNS


def test_many_frames_and_a_long_message_keep_the_innermost_and_the_advice():
    frames = [line for n in range(30) for line in (f'  File "train.py", line {n}, in f', f"    f({n})")]
    message = ["ValueError: first", *(f"  row {n}" for n in range(50)), "Do this."]
    shown = fold(["Traceback (most recent call last):", *frames, *message], 20)
    assert sum(max(1, -(-len(line) // COLUMNS)) for line in shown) <= 20
    assert "    f(29)" in shown
    assert "ValueError: first" in shown
    assert shown[-1] == "Do this."


def test_a_failure_before_ctrl_c_is_told(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal, sys\n"
        "if os.environ['RANK'] == '0':\n"
        "    signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
        "    print('up', flush=True)\n"
        "    while True: signal.pause()\n"
        "sys.stdin.read(); signal.sigwait\n"
        "while not os.path.exists('go'): pass\n"
        "raise ValueError('bad learning rate')\n"
    )
    command = [*PHALANX_RUN, "--nproc-per-node", "2", "--no-preload", str(script)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as running:
        assert running.stdout.readline() == "[rank 0] up\n"
        (tmp_path / "go").touch()
        assert running.stdout.readline() == "[rank 0] asked\n"
        running.send_signal(signal.SIGINT)
        running.send_signal(signal.SIGTERM)
        _, err = running.communicate(timeout=LIMIT_S)
    assert running.returncode in (130, 143), err
    assert err.count("ValueError: bad learning rate") == 1
    assert sys.executable not in err
