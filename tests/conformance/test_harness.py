"""The exam's harness itself: what must fail does, and leaves nothing behind."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from . import _load

Sat = tuple[dict[str, dict[str, str]], list[bool]]

# Sits tests that are added to the exam's own class, so that the real machinery judges them.
_PROGRAM = """
import dataclasses, json, os, subprocess, sys, tempfile, time
from {package}._load import load_exam
from {package}._runner import Runner

exam = load_exam("gloo", 2)

def test_passes(self):
    assert exam.dist.get_world_size() == 2

def test_hangs(self):
    time.sleep(60)

def test_second_rank_dies(self):
    if self.rank == 1:
        os._exit(7)

def test_second_rank_fails(self):
    print("seen before the failure")
    self.assertEqual(self.rank, 0)

def test_forgets_a_process(self):
    if self.rank == 0:
        subprocess.Popen(["sleep", "60"])

def test_forgets_shared_memory(self):
    if self.rank == 0:
        open("/dev/shm/exam-harness", "w").close()

tests = [value for name, value in list(globals().items()) if name.startswith("test_")]
for test in tests:
    setattr(exam.DistributedTest._DistTestBase, test.__name__, test)
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
with Runner(exam, limit_s=5) as runner:
    results = [dataclasses.asdict(runner.run(test.__name__)) for test in tests]
    directory = tempfile.gettempdir()
children = subprocess.run(["pgrep", "-P", str(os.getpid())], capture_output=True, text=True).stdout
left = [os.path.exists(directory), children != ""]
if os.path.exists("/dev/shm/exam-harness"):
    os.unlink("/dev/shm/exam-harness")
json.dump([results, left], answers)
"""


@pytest.fixture(scope="module")
def sat() -> Sat:
    """Results by name of the tests in `_PROGRAM`, and whether files or children were left."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(package="tests.conformance")],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results, left = json.loads(done.stdout)
    return {result["name"]: result for result in results}, left


@pytest.mark.parametrize(
    ("name", "outcome", "detail"),
    [
        ("test_passes", "passed", ""),
        ("test_hangs", "failed", "killed at the limit of 5 s"),
        ("test_hangs", "failed", "in test_hangs"),
        ("test_second_rank_dies", "failed", "exit codes [-9, 7]"),
        ("test_second_rank_fails", "failed", "seen before the failure"),
        ("test_forgets_a_process", "failed", "(sleep 60)"),
        ("test_forgets_shared_memory", "failed", "/dev/shm/exam-harness"),
    ],
)
def test_what_must_fail_fails_and_says_why(sat: Sat, name: str, outcome: str, detail: str) -> None:
    result = sat[0][name]
    assert result["outcome"] == outcome, result["detail"]
    assert detail in result["detail"]


def test_nothing_is_left_behind(sat: Sat) -> None:
    assert sat[1] == [False, False]


@pytest.mark.parametrize(
    ("source", "want"),
    [
        ("skip(BACKEND != 'gloo', 'x')", "skip(BACKEND != 'other', 'x')"),
        ("skip(BACKEND != 'mpi', 'x')", "skip(BACKEND != 'other', 'x')"),
        ("BACKEND == 'mpi'", "BACKEND == 'mpi'"),
        (
            "BACKEND != 'mpi' and BACKEND != 'gloo'",
            "BACKEND != 'mpi' and BACKEND != 'other'",
        ),
        ("require_backend_is_available({'gloo'})", "require_backend_is_available({'other'})"),
        ("new_group(backend=dist.Backend.GLOO)", "new_group(backend='other')"),
        ("BACKEND == 'nccl'", "BACKEND == 'nccl'"),
    ],
)
def test_gates_that_name_gloo_name_the_backend(source: str, want: str) -> None:
    rename = _load._Rename("other")
    assert ast.unparse(rename.visit(ast.parse(source))) == want
    assert not rename.unknown


@pytest.mark.parametrize("source", ["if backend == 'gloo': pass", "start('gloo')"])
def test_a_mention_of_gloo_that_is_new_is_noticed(source: str) -> None:
    rename = _load._Rename("other")
    rename.visit(ast.parse(source))
    assert rename.unknown == ["line 1"]
