"""When the ranks are started again, and when that could only fail again."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from .jobs import run_job

pytestmark = pytest.mark.usefixtures("warm_jobs")

USE = "import torch, torch.distributed as dist\ndist.init_process_group('phalanx')\n"
SAVE = USE + "import phalanx.checkpoint\nphalanx.checkpoint.save('saved', {'x': torch.ones(1)}, 1, wait=True)\n"
ATTEMPT = "os.environ['TORCHELASTIC_RESTART_COUNT']"


def test_what_every_rank_raises_at_once_is_not_tried_again(tmp_path):
    source = """
    sizes = {"width": 3}
    print(sizes["widht"])
    """
    done = run_job(tmp_path, source, "--max-restarts", "3")
    assert done.returncode == 1
    assert "phalanx run: restart" not in done.stderr
    assert "not started again: every rank raised KeyError at train.py:5, before any progress, and would" in done.stderr


def test_the_line_that_is_named_is_the_scripts(tmp_path):
    done = run_job(tmp_path, "import phalanx\nphalanx.Trainer(None, None, epochs=3)", "--max-restarts", "3")
    assert done.returncode == 1
    assert "not started again: every rank raised TypeError at train.py:4, before any progress" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "failure",
    [
        f"if RANK == 0 and {ATTEMPT} == '0': raise ValueError('of one rank')\ntime.sleep(0.1)",
        f"if {ATTEMPT} == '0' and RANK == 0: raise ValueError('here')\nif {ATTEMPT} == '0': raise ValueError('there')",
        f"if {ATTEMPT} == '0': os.kill(os.getpid(), signal.SIGKILL)",
        USE + f"for _ in range(100): dist.all_reduce(torch.ones(1))\nif {ATTEMPT} == '0': raise ValueError('late')",
        SAVE + f"if {ATTEMPT} == '0': raise ValueError('behind a checkpoint')",
    ],
    ids=["one rank", "other lines", "killed", "collectives", "checkpoint"],
)
def test_what_may_go_well_is_tried_again(tmp_path, failure):
    done = run_job(tmp_path, failure, "--max-restarts", "1")
    assert done.returncode == 0, done.stderr
    assert "phalanx run: restart 1 of 1" in done.stderr


def test_the_end_says_that_the_restarts_are_used_and_which_flag_gives_more(tmp_path):
    fails = "time.sleep(0.1 * RANK)\nos._exit(3)\n"
    done = run_job(tmp_path, fails, "--max-restarts", "1", "--no-preload")
    assert done.returncode == 3, done.stderr
    used = "phalanx run: no restart is left of the 1 that --max-restarts allows; raise it\n"
    assert done.stderr.count(used) == 1
    assert used in done.stderr.partition("restart 1 of 1")[2]
    done = run_job(tmp_path, fails, "--no-preload")
    assert done.returncode == 3, done.stderr
    assert "no restart is left" not in done.stderr


def test_logs_that_can_no_longer_be_kept_do_not_keep_the_ranks_from_being_started_again(tmp_path):
    source = """
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        import shutil, glob
        [run] = glob.glob("logs/*")
        shutil.rmtree(run)
        open(run, "w").close()  # no folder can be made there: as on a full disk, or one that is read-only
        sys.exit(3)
    print("again")
    """
    done = run_job(tmp_path, source, "--max-restarts", "1", "--no-preload", "--log-dir", "logs", num_ranks=1)
    assert done.returncode == 0, done.stderr
    assert "again" in done.stdout
    assert done.stderr.count("are incomplete: Not a directory") == 1


def test_why_of_a_job_whose_restarts_are_used_names_the_last_failure_and_the_one_before(tmp_path):
    source = USE + f"dist.barrier()\nif RANK: raise ValueError('number ' + {ATTEMPT})\ndist.barrier()\n"
    done = run_job(tmp_path, source, "--max-restarts", "1")
    assert done.returncode == 1, done.stderr
    [run] = tmp_path.glob("logs/train/*/")
    why = subprocess.run([sys.executable, "-m", "phalanx", "why", str(run)], capture_output=True, text=True, timeout=60)
    assert "\nrank 1 raised ValueError: number 1 at " in why.stdout
    assert "rank 1, raised ValueError; resumed after" in why.stdout
    assert "number 0" not in why.stdout


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton, which torch's wheel for CPUs alone lacks")
def test_a_rank_forked_from_a_standby_reports_no_leak_of_the_libraries_in_it(tmp_path):
    """triton's bindings print what is left at the interpreter's end, where the collector had passed it by."""
    job = run_job(
        tmp_path,
        """
        import pathlib
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            import triton
            from phalanx.launch.processes.modules import note_modules
            note_modules()
            log = pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[2] / "standby.log"
            while not (log.exists() and "ready" in log.read_text()):
                time.sleep(0.05)
            sys.exit(3)
        print("imported" if "libtriton" in open("/proc/self/maps").read() else "anew")
        """,
        "--max-restarts", "1", num_ranks=1,
    )  # fmt: skip
    assert job.returncode == 0, job.stderr
    assert "imported" in job.stdout
    assert "leaked" not in job.stderr
