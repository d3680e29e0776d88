"""``phalanx tune`` as a user calls it: real scripts, real ranks."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from phalanx import cli
from phalanx.host.cpus import read_machine
from phalanx.launch.command.flag_parser import without_flags
from phalanx.launch.command.tuned import Tuned, recall, remember, tuned_file
from phalanx.launch.rank_trial import _can_fuse
from phalanx.tune.trial_folder import folder_of_jobs
from phalanx.tune.trials import Setup, Trials, _rate
from phalanx.tune.tune import _SEARCHED

pytestmark = pytest.mark.usefixtures("warm_jobs")

TUNE = (sys.executable, "-m", "phalanx", "tune")
LIMIT_S = 120
PLAIN = """
    import sys, time, torch, torch.distributed as dist
    from torch.utils.data import DataLoader, TensorDataset
    {begin}
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(400, 4)), batch_size=8)
    for _ in range({epochs}):
        for (x,) in loader:
            model(x).sum().backward()
            time.sleep(0.004)
            {average}
            optimizer.step()
            optimizer.zero_grad()
"""
GROUP = {"begin": "dist.init_process_group('phalanx')", "average": "dist.all_reduce(model.weight.grad)"}
SLEEP = "time.sleep(0.004)"
CLOCK = "now = [0.0]; time.perf_counter = lambda: now[0]"
TICK = "now[0] += 0.004"  # which is what a step then costs, whatever runs beside the test
TWO_PROCESSES = """import subprocess
if not sys.argv[1:]:
    words = [sys.executable, __file__, "again"]
    with subprocess.Popen(words), subprocess.Popen(words):
        sys.exit()
"""
ALONE = {"begin": "pass", "average": "pass"}


def write(folder: Path, text: str, **parts: object) -> None:
    (folder / "train.py").write_text(textwrap.dedent(text).format(**{"epochs": 10**6, **parts}))


def tune(folder: Path, *words: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    words = words or ("--seconds", "5", "--json", "found.json", "train.py")
    return subprocess.run(
        [*TUNE, *words], cwd=folder, env={**os.environ, **(environ or {})}, capture_output=True, text=True,
        timeout=LIMIT_S, check=False, preexec_fn=on_two_cpus,
    )  # fmt: skip


def on_two_cpus() -> None:
    """Leave a process two CPUs, so that every machine has the same choices."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])


def found(folder: Path) -> dict:
    return json.loads((folder / "found.json").read_text())


def reasons(table: dict, begin: str) -> set[str]:
    """Return why the setups whose names begin so were not measured."""
    return {step["why"] for step in table["steps"] if step["name"].startswith(begin)}


def test_ranks_that_divide_the_work_are_the_best_command(tmp_path):
    write(tmp_path, PLAIN.replace(SLEEP, TICK), **GROUP | {"begin": f"{GROUP['begin']}; {CLOCK}"})
    done = tune(tmp_path, "--seconds", "5", "--json", "found.json", "--max-restarts", "2", "train.py")
    assert done.returncode == 0, done.stderr
    table = found(tmp_path)
    assert table["unit"] == "samples"
    assert (table["best"]["ranks"], table["best"]["threads"]) == (2, 1)
    taken = next(step for step in table["steps"] if step["name"] == "2 ranks x 1 thread")
    assert taken["taken"]
    assert taken["ratio"] == pytest.approx(2)
    assert "best: phalanx run --nproc-per-node 2 --max-restarts 2 train.py\n" in done.stdout
    assert "a step of 2 ranks has 2 times the samples" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert [path.name for path in (tmp_path / "logs" / "train").iterdir()] == ["tuned.json"]
    dry = [sys.executable, "-m", "phalanx", "run", "--dry-run"]
    for words in (["train.py"], ["train.py", "--other"], ["--nproc-per-node", "1", "train.py"]):
        done = subprocess.run(
            [*dry, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True, preexec_fn=on_two_cpus
        )
        assert (", as tuned" in done.stdout) == (words == ["train.py"])
        assert ("auto: phalanx tune" in done.stdout) == (words == ["train.py"])


@pytest.mark.slow
def test_ranks_without_a_process_group_are_no_choice(tmp_path):
    write(tmp_path, PLAIN, **ALONE)
    done = tune(tmp_path)
    assert done.returncode == 0, done.stderr
    table = found(tmp_path)
    assert table["best"]["ranks"] == 1
    assert reasons(table, "2 ranks") == {"makes no process group, so each rank would train on its own"}


@pytest.mark.slow
def test_a_script_that_is_over_soon_is_started_again(tmp_path):
    write(tmp_path, PLAIN, **GROUP | {"epochs": 1})  # 50 steps
    done = tune(tmp_path, "--seconds", "5", "--json", "found.json", "--nproc-per-node", "2", "train.py")
    assert done.returncode == 0, done.stderr
    table = found(tmp_path)
    assert next(step["name"] for step in table["steps"] if step["rate"]) == "2 ranks x 1 thread"
    assert table["steps"][0]["rate"] > 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("begin", "epochs", "said", "code"),
    [
        ("raise ValueError('no such data')", 1, ["ValueError: no such data", "nothing was measured"], 1),
        ("sys.exit(0)", 1, ["ended before its optimizer had taken three steps", "torch.optim optimizer"], 1),
        ("raise OSError('Address already in use')", 1, ["the jobs run side by side"], 1),
        ("raise ValueError('two processes claim rank 1')", 1, ["the jobs run side by side"], 1),
        (
            TWO_PROCESSES,
            1,
            ["takes optimizer steps in several processes of rank 0", "start no processes of your own"],
            1,
        ),
        ("sys.exit(7)", 1, ["ended before its optimizer had taken three steps"], 7),
        ("pass", 0, ["ended before its optimizer had taken three steps"], 1),
    ],
)
def test_a_script_that_can_not_be_measured_says_why(tmp_path, begin, epochs, said, code):
    write(tmp_path, PLAIN, begin=begin, average="pass", epochs=epochs)
    done = tune(tmp_path)
    assert done.returncode == code
    for words in said:
        assert words in " ".join(done.stderr.split())
    assert "phalanx-tune-" not in done.stderr  # a folder that is gone
    assert "best:" not in done.stdout
    assert "Traceback" not in done.stderr.partition("phalanx tune:")[2]


@pytest.mark.slow
def test_what_fails_with_one_number_of_ranks_is_a_line_of_the_table(tmp_path):
    write(tmp_path, PLAIN, **GROUP | {"begin": GROUP["begin"] + "; assert dist.get_world_size() == 2"})
    done = tune(tmp_path)
    assert done.returncode == 0, done.stderr
    table = found(tmp_path)
    assert table["best"]["ranks"] == 2
    assert reasons(table, "1 rank ") == {"ended before its optimizer had taken three steps"}


@pytest.mark.slow
def test_a_job_that_dies_while_it_is_measured_is_a_line_of_the_table(tmp_path):
    count = "num_steps = globals().get('num_steps', 0) + 1"
    dies = f"{count}; assert num_steps < 40 or dist.get_world_size() == 1, 'two are too many'"
    write(tmp_path, PLAIN, **GROUP | {"average": dies})
    done = tune(tmp_path)
    assert done.returncode == 0, done.stderr
    table = found(tmp_path)
    assert table["best"]["ranks"] == 1
    assert reasons(table, "2 ranks") == {"has ended with code 1"}


@pytest.mark.slow
def test_a_script_that_keeps_its_batches_is_measured_in_steps(tmp_path):
    write(
        tmp_path, PLAIN.replace("DataLoader(", "list(DataLoader(").replace("batch_size=8)", "batch_size=8))"), **GROUP
    )
    done = tune(tmp_path)
    assert done.returncode == 0, done.stderr
    assert found(tmp_path)["unit"] == "steps"


def test_steps_that_load_nothing_count_as_many_samples_as_usual():
    assert _rate([(0.1, 8, 0.0)] * 10, 8) == pytest.approx(80)
    assert _rate([(0.1, 0, 0.0)] * 10, 8) == pytest.approx(80)
    assert _rate([(0.1, 0, 0.0)] * 10, 0) == pytest.approx(10)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_an_optimizer_of_sparse_gradients_has_no_fused_form(is_sparse):
    embedding = torch.nn.Embedding(8, 2, sparse=is_sparse)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    embedding(torch.tensor([1])).sum().backward()
    assert _can_fuse(optimizer) != is_sparse


def test_trials_leave_the_log_folder_alone(tmp_path):
    words = ["--log-dir", "logs", "--seconds=5", "--memory", "auto", "--tee=3", "train.py", "--log-dir", "mine"]
    target = words[-3:]
    kept = without_flags([*_SEARCHED, "--seconds"], words, target)
    assert kept == ["--log-dir", "logs", "--tee=3", *target]
    assert without_flags(["--log-dir"], kept, target) == ["--tee=3", *target]


def test_trials_without_room_are_one_line(tmp_path):
    (tmp_path / "train.py").touch()
    program = """
        import sys, tempfile
        from phalanx.cli import main
        def full(**_): raise OSError(28, "No space left on device")
        tempfile.TemporaryDirectory = full
        sys.exit(main(["tune", "train.py"]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=tmp_path, capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "No space left on device; TMPDIR names another folder" in done.stderr


def spoilt(file: Path, kind: str) -> None:
    """Put something in the place of a good ``tuned.json``, or change one value of it."""
    good = json.loads(file.read_text())
    file.unlink()
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "loop":
        file.symlink_to(file)
    else:
        changed = {"memory": {"memory": "plenty"}, "bool": {"ranks": True}, "words": {"ranks": "2"}, "field": {"x": 1}}
        deep = "[" * 100_000
        file.write_text(json.dumps(good | changed[kind]) if kind in changed else {"deep": deep, "empty": ""}[kind])


@pytest.mark.parametrize("kind", ["fifo", "folder", "loop", "memory", "bool", "words", "field", "deep", "empty"])
def test_a_spoilt_file_of_what_was_found_is_not_used(tmp_path, kind):
    command, machine = [sys.executable, "train.py"], read_machine()
    file = tuned_file(str(tmp_path), command)
    remember(Tuned(command=["train.py"], machine=machine.describe(), ranks=1, threads=1, memory="auto"), file)
    assert recall(str(tmp_path), command, machine) is not None
    spoilt(Path(file), kind)
    assert recall(str(tmp_path), command, machine) is None


TRAINER = """
    import time, torch, phalanx
    from torch import nn

    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 64
        def __getitem__(self, index):
            time.sleep(0.01)
            return torch.randn(1, 8, 8), index % 2

    if __name__ == "__main__":
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 2))
        optimizer = torch.optim.Adam(model.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=16)
        trainer = phalanx.Trainer(model, optimizer, nn.functional.cross_entropy, scheduler=schedule,
                                  max_epochs={epochs}, global_batch_size=4, loggers=())
        trainer.fit(Slow())
"""


@pytest.mark.slow
def test_a_trainer_is_measured_for_as_long_as_it_takes_and_offers_its_settings(tmp_path):
    write(tmp_path, TRAINER, epochs=1)
    done = tune(tmp_path, "--seconds", "40", "--json", "found.json", "--nproc-per-node", "1", "train.py")
    assert done.returncode == 0, done.stderr
    table = found(tmp_path)
    steps = {step["name"]: step for step in table["steps"]}
    assert steps["Trainer(num_workers=8)"]["taken"]  # what a step costs is loading
    assert "Adam(fused=True)" in steps
    assert ["num_workers", 8] in table["best"]["changes"]
    assert "and in train.py: Trainer(..., num_workers=8" in done.stdout
    assert [path.name for path in (tmp_path / "logs" / "train").iterdir()] == ["tuned.json"]


def test_samples_are_counted_that_a_trainer_loads_without_workers(tmp_path):
    write(
        tmp_path,
        TRAINER.replace("time.sleep(0.01)", "pass").replace("loggers=", "num_workers=0, loggers="),
        epochs=1,
    )
    done = tune(tmp_path, "--seconds", "5", "--json", "found.json", "--nproc-per-node", "2", "train.py")
    assert done.returncode == 0, done.stderr
    table = found(tmp_path)
    assert table["unit"] == "samples"
    assert all(step["rate"] for step in table["steps"] if not step["why"])
    assert "taking turns: 1 way to divide" in done.stdout
    assert "faster than plain python" not in done.stdout  # which was not measured


@pytest.mark.slow
def test_a_flag_behind_the_script_and_a_result_that_can_not_be_kept_are_told(tmp_path):
    write(tmp_path, PLAIN, **GROUP)
    (tmp_path / "logs").write_text("a file, where a folder is needed")
    done = tune(tmp_path, "--seconds", "5", "--nproc-per-node", "1", "train.py", "--seconds", "9")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "--seconds goes to 'train.py': flags of phalanx tune come before the script" in said
    assert (
        "phalanx run can't use that automatically: 'logs/train/tuned.json' can't be written (Not a directory)" in said
    )
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_the_table_of_a_script_without_a_loader_counts_steps_and_fits_80_columns(tmp_path):
    write(tmp_path, PLAIN.replace("for (x,) in loader:", "for x in torch.randn(50, 8, 4):"), **ALONE)
    done = tune(tmp_path, "--seconds", "8", "--nproc-per-node", "1", "train.py")
    assert done.returncode == 0, done.stderr
    assert "  steps/s  speed" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_script_that_takes_no_step_in_time_is_told_what_gives_it_more(tmp_path):
    (tmp_path / "train.py").write_text("import time, torch; time.sleep(60)")
    setup = Setup(ranks=1, threads=1)
    with Trials([str(tmp_path / "train.py")], str(tmp_path / "jobs"), time.monotonic()) as trials:
        failed = trials.start([setup], 1)
    assert "has not taken its steps in time; --seconds gives it more" in str(failed[setup])


def test_threads_that_the_user_has_set_are_not_searched_and_jobs_leave_nothing_in_the_folder_for_logs(tmp_path):
    write(tmp_path, PLAIN, **GROUP)
    done = tune(
        tmp_path, "--seconds", "5", "--json", "found.json", "--nproc-per-node", "1", "--log-dir", "logs", "train.py",
        environ={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [step["name"] for step in found(tmp_path)["steps"]][:2] == [
        "plain python: 1 rank x 1 thread",
        "1 rank x 1 thread",
    ]
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["tuned.json"]
    best = done.stdout.partition("best: OMP_NUM_THREADS=1 phalanx run --nproc-per-node 1")[2]
    assert " --log-dir logs train.py\n" in best


@pytest.mark.slow
def test_tunables_of_the_user_leave_memory_alone(tmp_path):
    write(tmp_path, PLAIN, **GROUP)
    done = tune(
        tmp_path, "--seconds", "5", "--json", "found.json", "--nproc-per-node", "1", "train.py",
        environ={"MALLOC_ARENA_MAX": "2"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "memory not kept (MALLOC_ARENA_MAX is set)" in " ".join(done.stdout.split())  # lines are filled
    assert not any("--memory" in step["name"] for step in found(tmp_path)["steps"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--seconds", "1", "train.py"), "--seconds must be seconds from 5 to 86400, got '1'"),
        (("--json", "nowhere/found.json", "train.py"), "--json must name a file that can be written"),
        (("--json", ".", "train.py"), "--json must name a file that can be written"),
        (("--nnodes", "2", "train.py"), "phalanx tune measures on one machine"),
        ((), "no script given"),
        (("--dry-run", "train.py"), "--dry-run is for phalanx run"),
        (("--secnds", "9", "train.py"), "did you mean --seconds?"),
    ],
)
def test_mistakes_in_the_command_line_are_named(tmp_path, monkeypatch, capsys, words, said):
    write(tmp_path, PLAIN, **ALONE)
    monkeypatch.chdir(tmp_path)
    code = cli.main(["tune", *words])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert said in err
    assert "usage: phalanx tune" in err


def processes_in(folder: Path) -> set[str]:
    """Return the processes whose current folder this is."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(process / "cwd") == str(folder):
                found.add(process.name)
    return found


@pytest.mark.slow
def test_a_rank_that_hangs_in_a_turn_is_a_line_of_the_table(tmp_path):
    count = "num_steps = globals().get('num_steps', 0) + 1"
    hangs = f"{count}; dist.get_world_size() > 1 and num_steps == 30 and time.sleep(1000)"
    write(tmp_path, PLAIN, **GROUP | {"average": hangs})
    began_s = time.monotonic()
    done = tune(tmp_path)
    assert time.monotonic() - began_s < 60
    assert done.returncode == 0, done.stderr
    table = found(tmp_path)
    assert table["best"]["ranks"] == 1
    assert reasons(table, "2 ranks") == {"has not taken its steps in time; --seconds gives it more"}


@pytest.mark.slow
def test_a_job_that_hangs_before_its_first_step_is_given_what_others_took(tmp_path, monkeypatch):
    monkeypatch.setattr("phalanx.tune.trials._LEAST_START_S", 1.0)
    write(tmp_path, PLAIN, **ALONE | {"begin": "import os; os.environ['WORLD_SIZE'] == '2' and time.sleep(1000)"})
    one, two = Setup(ranks=1, threads=1), Setup(ranks=2, threads=1)
    with Trials([str(tmp_path / "train.py")], str(tmp_path / "jobs"), time.monotonic()) as trials:
        failed = trials.start([two, one], 1000)
        assert [*failed] == [two]
        assert trials.start_s > 0


def test_a_script_that_does_not_want_to_end_is_ended_with_its_daemons(tmp_path):
    daemon = "subprocess.Popen(['sleep', '1000'], start_new_session=True)"
    begin = f"import signal, subprocess; signal.signal(signal.SIGTERM, signal.SIG_IGN); {daemon}; "
    write(tmp_path, PLAIN, **GROUP | {"begin": begin + GROUP["begin"]})
    began_s = time.monotonic()
    done = tune(tmp_path, "--seconds", "5", "--nproc-per-node", "2", "train.py")
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began_s < 40
    assert not processes_in(tmp_path)


def test_a_search_sweeps_what_a_killed_one_has_left_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with folder_of_jobs() as living, open(os.path.join(tmp_path, "a file"), "w"):
        killed = tmp_path / "phalanx-tune-killed"
        killed.mkdir()
        (killed / "lock").touch()
        (tmp_path / "phalanx-tune-of-somebody").mkdir()
        (tmp_path / "phalanx-tune-link").symlink_to(killed)
        with folder_of_jobs() as own:
            assert {living, own} == {str(path) for path in tmp_path.iterdir() if (path / "lock").exists()}
            assert len(os.listdir(tmp_path)) == 5
    assert sorted(os.listdir(tmp_path)) == ["a file", "phalanx-tune-link", "phalanx-tune-of-somebody"]


@pytest.fixture(scope="module")
def one_room(tmp_path_factory):
    return tmp_path_factory.mktemp("room")


@pytest.fixture
def room(one_room):
    """An empty TMPDIR; it is one for all, since a warm process serves only jobs with its own."""
    for left in one_room.iterdir():
        shutil.rmtree(left)
    return one_room


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_an_end_in_the_middle_leaves_no_process(tmp_path, room, kind):
    write(tmp_path, PLAIN, **GROUP | {"begin": f"open(r'{tmp_path}/begun', 'a').close(); {GROUP['begin']}"})
    end_in_the_middle(tmp_path, room, kind, "--nproc-per-node", "2")


SIGNAL_UNDER_LOCK = """
    import os, signal, sys
    from phalanx.tune.trial_job import TrialJob, end_on_signals

    class Lock:
        def __init__(self, lock):
            self.lock, self.release = lock, lock.release
        def acquire(self, *words):
            taken = self.lock.acquire(*words)
            os.kill(os.getpid(), signal.SIGTERM)
            return taken
        def __enter__(self):
            self.lock.acquire()
        def __exit__(self, *_):
            self.release()

    end_on_signals()
    job = TrialJob(["train.py"], sys.argv[1], 1, {})
    try:
        job._process._waitpid_lock = Lock(job._process._waitpid_lock)
        while True:
            job.told(0)
    finally:
        job.end()
"""


def test_a_signal_that_comes_as_a_job_is_looked_at_ends_the_search(tmp_path):
    """An exception of a handler, right there, would leave a lock of `subprocess` taken for good."""
    (tmp_path / "train.py").write_text("import time; time.sleep(1000)")
    words = [sys.executable, "-c", textwrap.dedent(SIGNAL_UNDER_LOCK), str(tmp_path / "room")]
    assert subprocess.run(words, cwd=tmp_path, timeout=LIMIT_S).returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_an_end_before_the_first_step_leaves_no_process(tmp_path, room, kind):
    (tmp_path / "train.py").write_text(f"import time; open(r'{tmp_path}/begun', 'a').close(); time.sleep(1000)")
    # Several jobs at once by one of the signals that are handled, and by the one that is not.
    flags = () if kind in (signal.SIGTERM, signal.SIGKILL) else ("--nproc-per-node", "2")
    end_in_the_middle(tmp_path, room, kind, *flags)


def end_in_the_middle(tmp_path: Path, room: Path, kind: int, *flags: str) -> None:
    """Send a signal to a search whose script has begun, and check that nothing of it is left."""
    with subprocess.Popen(
        [*TUNE, "--seconds", "600", *flags, "train.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "TMPDIR": str(room)},
    ) as process:  # fmt: skip
        deadline = time.monotonic() + LIMIT_S
        while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(processes_in(tmp_path)) > 3
        process.send_signal(kind)
        code = process.wait(LIMIT_S)
    assert code == (-kind if kind == signal.SIGKILL else 128 + kind)
    ended_s = time.monotonic()
    while processes_in(tmp_path) and time.monotonic() < ended_s + 20:
        time.sleep(0.01)
    assert not processes_in(tmp_path)
    assert (os.listdir(room) == []) == (kind != signal.SIGKILL)
