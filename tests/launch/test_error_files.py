"""What a rank writes when an exception ends it, who is believed, and what is told from it."""

from __future__ import annotations

import json
import os
import re

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

from phalanx._errors import Failure
from phalanx.failure import last_words
from phalanx.failure.last_words import LastWords
from phalanx.failure.report import first_true_failure
from tests.launch.jobs import run_job

pytestmark = pytest.mark.usefixtures("warm_jobs")

SCRIPT = """
import torch, torch.distributed as dist, phalanx
from torch.distributed.elastic.multiprocessing.errors import record
assert sys.excepthook is sys.__excepthook__  # no import sets a hook
CASE = CASES[int(os.environ["TORCHELASTIC_RESTART_COUNT"])]
if CASE == "hooked_before": sys.excepthook = lambda kind, error, trace: print("in a box", file=sys.stderr)
dist.init_process_group("phalanx")
ones = torch.ones(1)
for _ in range(40): dist.all_reduce(ones)  # progress: what all ranks raise alike is tried again

def raises():
    if RANK == 1:
        raise ValueError("bad learning rate: 0.5\\nwas 0.1")
    dist.all_reduce(ones)

def fail_after_the_victim():
    dist.destroy_process_group()
    while not os.path.exists(os.environ["TORCHELASTIC_ERROR_FILE"].replace("rank_1", "rank_0")): time.sleep(0.01)
    sys.exit(7)

def callback():  # of a future: native code gives on its text alone
    if RANK == 1: fail_after_the_victim()
    dist.all_reduce(ones, async_op=True).get_future().wait()

def handles():
    if RANK == 1: fail_after_the_victim()
    try:
        dist.all_reduce(ones)
    except phalanx.RankFailed:
        raise KeyError("no fallback")

def differs():  # on one host both have the table, and neither is a victim
    dist.all_reduce(ones) if RANK == 0 else dist.broadcast(ones, 0)

def own_hook():
    sys.excepthook = lambda kind, error, trace: print("Traceback (most recent call last):", f"{kind.__name__}: {error}",
        sep="\\n", file=sys.stderr)
    raise ArithmeticError(f"of rank {RANK}")

def goes_on():
    try:
        raise ValueError("printed alone")
    except ValueError:
        sys.excepthook(*sys.exc_info())
    sys.exit(3 + RANK)

def forks():
    if RANK == 1:
        if (child := os.fork()) == 0:
            raise ValueError("of a child")
        os.waitpid(child, 0)
    raise LookupError(f"rank {RANK}")

def hooked_before():
    raise BufferError(f"on rank {RANK}")

@record
def recorded():
    raise OverflowError("loss")

globals()[CASE]()
"""
CASES = ("raises", "callback", "handles", "differs", "own_hook", "goes_on", "forks", "hooked_before", "recorded")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """One job that fails in one way after another: what it said, and the error files of both ranks of each attempt."""
    folder = tmp_path_factory.mktemp("job")
    done = run_job(folder, f"CASES = {CASES}\n{SCRIPT}", "--warm", "--max-restarts", str(len(CASES) - 1))
    said = done.stderr.split("phalanx run: rank ")[1:]
    assert len(said) == len(CASES), done.stderr
    files = {}
    for number, case in enumerate(CASES):
        paths = sorted(folder.glob(f"logs/train/*/attempt_{number}/rank_*/error.json"))
        files[case] = {int(path.parent.name[5:]): json.loads(path.read_text()) for path in paths}
    return dict(zip(CASES, said, strict=True)), files


def test_a_rank_that_raises_leaves_the_facts_in_the_form_of_torchs_record(job):
    error = job[1]["raises"][1]
    assert error["message"]["message"] == "ValueError: bad learning rate: 0.5\nwas 0.1"
    assert 'raise ValueError("bad' in error["message"]["extraInfo"]["py_callstack"]
    assert int(error["message"]["extraInfo"]["timestamp"]) > 0
    facts = error["exception"]
    assert (error["rank"], facts["kind"], facts["is_victim"], facts["failure"]) == (1, "ValueError", False, None)
    path, _, line = facts["site"].rpartition(":")
    assert (os.path.basename(path), line.isdigit()) == ("train.py", True)


def test_its_victim_has_the_failure_as_data(job):
    facts = job[1]["raises"][0]["exception"]
    assert (facts["kind"], facts["is_victim"]) == ("phalanx.RankFailed", True)
    failure = Failure.from_facts(facts["failure"])
    assert (failure.rank, failure.ranks, failure.op) == (0, (1,), "all_reduce")
    assert job[0]["raises"].startswith("1 (pid ")
    assert "raised ValueError and exited with code 1\n" in job[0]["raises"]


@pytest.mark.parametrize("case", ["callback", "handles"])
def test_what_follows_from_a_victims_error_is_a_victims(job, case):
    facts = job[1][case][0]["exception"]
    assert facts["kind"] == {"callback": "RuntimeError", "handles": "KeyError"}[case]
    assert facts["is_victim"]
    assert Failure.from_facts(facts["failure"]).ranks == (1,)
    assert job[0][case].startswith("1 (pid "), job[0][case]
    assert "exited with code 7\n" in job[0][case]
    assert job[0][case].count("Traceback") == 0


def test_ranks_that_disagree_are_told_from_their_victims(job):
    for error in job[1]["differs"].values():
        assert error["exception"]["kind"] == "phalanx.CollectiveMismatch"
        assert not error["exception"]["is_victim"]


def test_where_the_rank_wrote_nothing_its_stderr_tells(job):
    for case, kind in (("own_hook", "ArithmeticError"), ("goes_on", "ValueError")):
        for error in job[1][case].values():
            assert (error["exception"]["kind"], error["exit_code"]) == (
                kind,
                1 if case == "own_hook" else 3 + error["rank"],
            )
    assert "raised ArithmeticError and exited with code 1\n" in job[0]["own_hook"]
    assert "raised" not in job[0]["goes_on"].splitlines()[0]


def test_a_hook_that_was_there_before_prints_as_ever(job):
    assert "in a box\n" in "".join(job[0].values())
    assert "raised BufferError and exited with code 1\n" in job[0]["hooked_before"]
    assert "BufferError: on rank " in job[0]["hooked_before"]


def test_a_child_that_was_forked_writes_nothing_in_the_ranks_name(job):
    for rank, error in job[1]["forks"].items():
        assert error["message"]["message"] == f"LookupError: rank {rank}"


def test_what_torchs_record_has_written_stays(job):
    for rank, error in job[1]["recorded"].items():
        assert error["message"]["message"] == "OverflowError: loss"
        assert error["message"]["extraInfo"]["py_callstack"].count("recorded") == 1  # from there on, as @record says it
        assert (error["rank"], error["exception"]["kind"]) == (rank, "OverflowError")


def wait_for_a_dead_rank(rank, world_size):
    dist.barrier()
    if rank == 1:
        os._exit(7)
    dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()


def test_ranks_that_were_spawned_are_judged_by_the_same_facts(run_ranks):
    outcomes = run_ranks(wait_for_a_dead_rank, 3, expect_failures=True)
    assert [outcome.is_victim for outcome in outcomes] == [True, False, True]
    assert outcomes[0].last_words.failure.ranks == (1,)
    error = first_true_failure(outcomes)
    assert re.fullmatch(
        r"rank 1 \(pid \d+\) exited with code 7 \[world_size 3\]\n  ranks 0 and 2: RuntimeError, because of it",
        str(error),
    )
    assert (error.rank, error.exitcode, error.error, error.hung) == (1, 7, None, [])


# ---------------------------------------------------------------- files that nobody should believe

GOOD = LastWords(
    "phalanx.RankFailed", "gone", ("Traceback:", "phalanx.RankFailed: gone"), True, site="a.py:1", is_told=True
)


def test_what_was_written_is_read(tmp_path):
    path = str(tmp_path / "error.json")
    last_words.write(path, GOOD.record(0, 7))
    assert last_words.read(path, 7) == GOOD
    assert last_words.read(path, 8) is None  # of another process
    assert os.listdir(tmp_path) == ["error.json"]


def test_a_file_that_is_cut_off_huge_or_no_file_is_none(tmp_path):
    path = str(tmp_path / "error.json")
    assert last_words.read(path, 7) is None
    os.mkfifo(path)
    assert last_words.read(path, 7) is None
    os.remove(path)
    whole = json.dumps(GOOD.record(0, 7))
    for content in (whole[:-9], "", "[" * 100_000, whole + " " * (5 << 20)):
        (tmp_path / "error.json").write_text(content)
        assert last_words.read(path, 7) is None
    with open(path, "w") as sparse:
        sparse.truncate(1 << 40)
    assert last_words.read(path, 7) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=9,
)
FACTS = st.fixed_dictionaries({}, optional=dict.fromkeys(("kind", "message", "is_victim", "failure", "site"), JSON))
STACK = st.fixed_dictionaries({"extraInfo": st.fixed_dictionaries({"py_callstack": st.text(max_size=50) | JSON})})


@given(JSON | st.fixed_dictionaries({"pid": st.just(7) | JSON, "message": STACK | JSON, "exception": FACTS | JSON}))
@example({"pid": 7, "message": {"extraInfo": {"py_callstack": "x"}}, "exception": {"kind": "E", "message": "\x1b[2J"}})
@example({"pid": 7.0, "message": [], "exception": {}})
def test_any_content_is_read_or_left(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(content))
    words = last_words.read(str(path), 7)
    if words is not None:
        assert last_words.LastWords(**vars(words)).summary
        assert "\n" not in words.message
        assert len(words.lines) <= 401


def test_a_long_traceback_is_written_so_that_it_is_read(tmp_path):
    path = str(tmp_path / "error.json")
    words = LastWords("E", "\U0001f600" * 100_000, ("\U0001f600" * 5000,) * 5000, is_told=True)
    last_words.write(path, words.record(0, 7))
    found = last_words.read(path, 7)
    assert found is not None
    assert (found.kind, len(found.lines)) == ("E", 401)
