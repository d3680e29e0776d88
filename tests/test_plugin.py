"""The pytest plugin. Inner runs of pytest hold many tests each, since each imports torch once."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.failure.last_words import LastWords
from phalanx.testing.plugin import hooks, shown

INNER = Path(__file__).parent / "plugin"
ROOT = INNER.parents[1]
_LIMIT_S = 300
_NOTES_REPORTS = """
import json, os
told = {"reports": [], "warnings": []}
def pytest_runtest_logreport(report):
    told["reports"].append({
        "name": report.nodeid.partition("::")[2], "kind": type(report).__name__, "when": report.when,
        "outcome": report.outcome, "text": report.longreprtext, "sections": dict(report.sections),
        "expected": hasattr(report, "wasxfail"), "properties": report.user_properties,
    })
def pytest_warning_recorded(warning_message, nodeid):
    told["warnings"].append([nodeid.partition("::")[2], str(warning_message.message)])
def pytest_sessionfinish():
    if "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ["TOLD"], "w") as file:
            json.dump(told, file)
"""


class Inner:
    """A run of pytest, and what its tests have come to; `run` does what ``subprocess.run`` does."""

    def __init__(self, run: Callable[..., Any], folder: Path, name: str, *options: str) -> None:
        (folder / "notes_reports.py").write_text(_NOTES_REPORTS)
        told = folder / "told.json"
        done = run(
            *arguments(name, "-p", "notes_reports", *options), cwd=folder, timeout=_LIMIT_S,
            env=environment(folder, TOLD=str(told)),
        )  # fmt: skip
        self.output, self.code = done.stdout + done.stderr, done.returncode
        if not told.exists():
            raise AssertionError(self.output)
        self.told = json.loads(told.read_text())

    def reports(self, name: str, kind: str = "TestReport") -> list[dict]:
        return [one for one in self.told["reports"] if one["name"] == name and one["kind"] == kind]

    def outcome(self, name: str) -> str:
        outcomes = {one["outcome"] for one in self.reports(name)}
        return next((one for one in ("failed", "skipped") if one in outcomes), "passed")

    def text(self, name: str) -> str:
        return "\n".join(one["text"] for one in self.reports(name) if one["outcome"] != "passed")

    def sections(self, name: str) -> dict[str, str]:
        (call,) = (one for one in self.reports(name) if one["when"] == "call")
        return call["sections"]


def run_on_one_cpu(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    cpu = min(os.sched_getaffinity(0))
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, preexec_fn=lambda: os.sched_setaffinity(0, {cpu}),
        **options,
    )  # fmt: skip


def arguments(name: str, *options: str) -> list[str]:
    plain = ["-p", "no:cacheprovider", "--rootdir", str(INNER), "--confcutdir", str(INNER), "-c", os.devnull]
    plain.append("--color=no")
    ignored = ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
    return ["-m", "pytest", "-q", *plain, *ignored, *options, str(INNER / name)]


def environment(folder: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    return {**kept, "PYTHONPATH": f"{folder}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200", **more}


@pytest.fixture(scope="module")
def marked(forked, tmp_path_factory):
    return Inner(forked.run, tmp_path_factory.mktemp("marked"), "inner_marked.py")


@pytest.fixture(scope="module")
def wrong(forked, tmp_path_factory):
    return Inner(forked.run, tmp_path_factory.mktemp("wrong"), "inner_wrong.py")


@pytest.mark.ranks(2)
def test_a_local_function_of_this_very_run_has_ranks(rank):
    import torch
    import torch.distributed as dist

    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [1.0] * 3


@pytest.mark.parametrize(
    "name",
    [
        "test_fixtures",
        "test_random_numbers_go_on_from_the_parents",
        "test_session",
        "test_hosts",
        "TestMethods::test_method[1ranks-7]",
        "TestMethods::test_method[2ranks-7]",
        "TestUnit::test_passes",
        "TestAsync::test_waits",
        "test_captures_by_fixture",
        "test_warns",
        "test_warns_the_session",
        "test_leaves_daemons",
        "test_tries_examples",
        "test_makes_its_own_group",
    ],
)
def test_a_test_passes_on_its_ranks(marked, name):
    assert marked.reports(name), marked.output
    assert marked.outcome(name) == "passed", marked.text(name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("test_skips", r"inner_marked.py.*not today"),
        ("test_lacks_a_module", "no_such_module"),
        ("TestUnit::test_skips", "because"),
        ("test_is_expected_to_fail", "as expected"),
        ("test_expects_to_fail", "assert 2 == 1"),
    ],
)
def test_a_rank_leaves_the_test_as_the_test_itself_would(marked, name, words):
    assert marked.outcome(name) == "skipped", marked.text(name)
    assert re.search(words, marked.text(name))
    assert any(one["expected"] for one in marked.reports(name)) == ("to_fail" in name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("test_one_fails", [r"rank 1 \(pid \d+\) raised AssertionError", "rank 0: RankFailed", "assert 42 == 0"]),
        ("test_both_fail", ["rank [01]: the same error", "assert 2.0 == 5", r"tensor\(\[2.\]\).item"]),
        ("TestUnit::test_fails", ["rank 1 .*AssertionError: 1 != 0", "self.assertEqual"]),
        ("TestSizes::test_two_sizes", [r"\[world_size 2\]", "assert 2 == 1"]),
        ("test_expects_to_fail_on_one_rank_and_fails_on_another", ["rank [01]: the same error", "== 2"]),
        ("test_fails_otherwise_than_expected", ["KeyError: 'other'"]),
        ("test_raises_a_local_class", ["Odd: strange"]),
        ("test_is_killed", ["rank 1 .* was killed by SIGKILL", "ranks 0 and 2: RankFailed, because of it"]),
        ("test_exits_without_a_code", [r"rank 1 \(pid \d+\) raised SystemExit: .*, at \S*inner_marked.py:\d+"]),
        ("test_raises_what_cannot_be_said", ["rank 1 .* raised .*Mute", "raise Mute"]),
        ("test_fails_in_a_thread", ["Exception in thread", "ZeroDivisionError"]),
        ("test_leaves", ["rank 1 .* exited with code 3"]),
        ("test_has_a_group_already", ["twice", r"hint: .*ranks\(\.\.\., init=False\)"]),
    ],
)
def test_a_failure_names_its_rank_with_the_values(marked, name, words):
    assert marked.outcome(name) == "failed"
    for one in words:
        assert re.search(one, marked.text(name)), marked.text(name)


def test_a_hang_is_told_by_what_phalanx_why_knows_and_by_the_stacks_of_the_test_alone(marked):
    text = marked.text("test_hangs")
    assert re.match(r"rank 1 has not called barrier #1 .* in test_hangs at \S*inner_marked.py:\d+", text), text
    assert "limit 10 s passed" in text
    assert "in test_hangs" in text.partition("--- rank 1:")[2]
    last = text.rstrip().splitlines()[-1]
    assert re.fullmatch(r"for a limit other than \S+ s, change @pytest\.mark\.ranks\(2, timeout_s=SECONDS\)", last), (
        text
    )
    assert "pluggy" not in text


def test_an_error_of_an_operation_is_shown_at_the_tests_line_and_not_below(marked):
    text = marked.text("test_calls_different_things")
    assert "dist.all_reduce(torch.ones(2 + rank))" in text
    assert "E         rank 1: all_reduce(float32, count=3, op=SUM)" in text
    assert re.search(r"inner_marked.py:\d+: CollectiveMismatch$", text), text
    assert "_dispatch" not in text
    assert "distributed_c10d" not in text


def test_the_summary_of_a_failure_names_its_rank(marked):
    assert re.search(r"^FAILED .*test_one_fails - rank 1: assert 42 == 0", marked.output, re.MULTILINE)


def test_what_ranks_print_and_log_is_shown_with_the_test(marked):
    sections = marked.sections("test_is_captured")
    assert sorted(sections["Captured stdout call"].split("\n")[:2]) == ["printed by 0", "printed by 1"]
    assert sorted(sections["Captured stderr call"].split("\n")[:2]) == ["told by 0", "told by 1"]
    assert "logged by 1" in sections["Captured log of rank 1 call"]


def test_a_warning_of_several_ranks_is_one_of_the_session(marked):
    assert marked.told["warnings"] == [["test_warns_the_session", "on both ranks"]]


def test_a_property_that_ranks_record_is_the_tests(marked):
    assert marked.reports("test_warns")[-1]["properties"] == [["told", "once"]]


def test_a_subtest_is_reported_once_as_on_the_rank_where_it_fails(marked):
    subtests = marked.reports("test_subtests", "SubtestReport")
    assert [one["outcome"] for one in subtests] == ["passed", "failed"]
    assert "rank = 1" in subtests[1]["text"]
    assert re.search(r"^FAILED .*test_subtests - contains 1 failed subtest", marked.output, re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("test_no_size", "a number of ranks is missing; right: @pytest.mark.ranks(2)"),
        ("test_zero", "must be a whole number of at least 1, got 0"),
        ("test_words", "must be a whole number of at least 1, got 'two'"),
        ("test_true", "must be a whole number of at least 1, got True"),
        ("test_fraction[2ranks]", "must be a whole number of at least 1, got 2.5"),
        ("test_unknown_option", "has no option backnd, did you mean backend"),
        ("test_start_method", "an interpreter of its own runs by phalanx.testing.run_ranks"),
        ("test_hosts_that_do_not_add_up", "hosts must add up to the 2 ranks, got [1, 2]"),
        ("test_hosts_in_words", "hosts must be a list"),
        ("test_no_time", "timeout_s must be a number of seconds above 0, got 0"),
        ("test_timeout_in_words", "group_timeout_s must be a number of seconds above 0, got 'long'"),
        ("test_environment_without_a_name", "env must be a dictionary of strings, with names that are not empty"),
        ("test_environment_of_numbers", "env must be a dictionary of strings"),
        ("test_backend_number", "backend must be a string"),
        ("test_init_in_words", "init must be True or False"),
        ("test_init_method_number", "init_method must be 'file', 'tcp', 'env' or a URL"),
        ("test_too_many", "100000000 ranks need "),
        ("test_group_without_one", "the fixture group needs a process group: leave init=False"),
        ("test_rank_without_mark", "mark the test with @pytest.mark.ranks(2)"),
        ("test_world_size_without_mark", "mark the test with @pytest.mark.ranks(2)"),
        ("test_asks_late", "ask for the fixture rank by name"),
        ("test_shares_a_loop", "the fixture loop is an event loop, which ranks can't share"),
        ("test_group_of_the_parent", "has a default process group, and that can't be forked"),
        ("test_gpu_of_the_parent", "which has initialised cuda, and that can't be forked"),
        ("test_gpu_was_asked_for_before_the_fork", "hint: pytest's process has asked CUDA something before it forked"),
        ("test_no_more_processes", "2 ranks can't be forked: Resource temporarily unavailable; the user (ulimit -u)"),
        ("test_no_memory", "2 ranks need at least "),
    ],
)
def test_nonsense_and_what_cannot_be_forked_is_refused_in_words(wrong, name, words):
    assert wrong.outcome(name) == "failed", wrong.output
    assert words in wrong.text(name)


@pytest.fixture
def item(request):
    item = pytest.Function.from_parent(request.node.parent, name="test_x", callobj=lambda: None)
    item.add_marker(pytest.mark.ranks(2))
    return item


def test_an_old_pytest_is_refused_in_words(monkeypatch, item):
    monkeypatch.setattr(pytest, "__version__", "6.2.5")
    hooks.pytest_collection_modifyitems([item])
    with pytest.raises(pytest.fail.Exception, match=r"needs pytest 7 or later, and this is pytest 6\.2\.5"):
        item.setup()


def test_another_system_is_refused_in_words(monkeypatch, item):
    monkeypatch.setattr(sys, "platform", "darwin")
    hooks.pytest_collection_modifyitems([item])
    with pytest.raises(pytest.fail.Exception, match="on Linux alone; here skip the test"):
        item.setup()


@pytest.mark.parametrize("name", ["phalanx.testing.plugin.on_rank", "_pytest.python", "pluggy"])
def test_frames_below_the_test_are_left_out_of_a_stack(name):
    spec = importlib.util.find_spec(name)
    assert spec is not None
    kept = ("Thread 0x1 (most recent call first):", '  File "/me/test_a.py", line 3 in test_a')
    left_out = (f'  File "{spec.origin}", line 7 in run', '  File "/usr/lib/python3.11/threading.py", line 9 in run')
    words = LastWords(lines=(*kept, *left_out, *kept))
    assert shown.without_ours(words).lines == kept * 2


def test_the_limit_of_ranks_is_below_that_of_pytest_timeout(request):
    from phalanx.testing.plugin.item import _limit_s

    assert _limit_s(request.node, 60, 3) == 60
    request.node.add_marker(pytest.mark.timeout(20))
    assert _limit_s(request.node, 60, 0) == _limit_s(request.node, 30, 0) == 16
    assert _limit_s(request.node, 60, 3) == 13
    assert _limit_s(request.node, 5, 3) == 5


def test_the_plugin_loads_nothing_until_a_test_is_marked():
    program = (
        "import sys, pytest; before = set(sys.modules); import phalanx.testing.plugin.hooks; "
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    packages = ["phalanx", "phalanx.testing", "phalanx.testing.plugin"]
    assert done.stdout.split() == [*packages, "phalanx.testing.plugin.hooks"]
    assert hooks.__doc__


def test_options_of_pytest_are_obeyed(forked, tmp_path):
    ran = Inner(forked.run, tmp_path, "inner_few.py", "--capture=sys", "-x", "--durations=1", "--durations-min=0")
    assert ran.outcome("test_fails_last") == "failed"
    assert not ran.reports("test_after_it")
    assert sorted(ran.sections("test_fails_last")["Captured stdout call"].split("\n")[:2]) == [
        "printed by 0", "printed by 1",
    ]  # fmt: skip
    assert "call     inner_few.py::test_fails_last" in ran.output


def test_ranks_run_below_more_workers_of_xdist_than_cores(tmp_path):
    ran = Inner(run_on_one_cpu, tmp_path, "inner_few.py", "-n", "2")
    assert ran.outcome("test_after_it") == "passed"
    assert "assert (1 == 0 or 17 == 0)" in ran.text("test_fails_last")
    assert re.search(r"^FAILED .*test_fails_last - rank 1: assert", ran.output, re.MULTILINE)


def test_lines_that_only_ranks_run_are_covered(forked, tmp_path):
    if importlib.util.find_spec("pytest_cov") is None:
        pytest.skip("pytest-cov is not installed")
    ran = Inner(
        forked.run, tmp_path, "inner_few.py", "-k", "test_fails_last", "--cov=tests.plugin.covered", "--cov-branch",
        "--cov-report=json:covered.json", "--cov-report=",
    )  # fmt: skip
    assert ran.outcome("test_fails_last") == "failed"
    (measured,) = json.loads((tmp_path / "covered.json").read_text())["files"].values()
    assert measured["missing_lines"] == [11]
    assert measured["missing_branches"] == []


# ---------------------------------------------------------------- ends


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def test_nothing_that_ranks_have_started_outlives_the_test(marked):
    pids = [pid for name, pid in marked.reports("test_leaves_daemons")[-1]["properties"] if name == "daemon"]
    assert len(pids) == 6
    assert not list(filter(_is_alive, pids))


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_pytest_however_it_ends(forked, tmp_path, sig):
    run = arguments("inner_few.py", "-k", "test_waits_for_ever")
    with forked.start(*run, cwd=tmp_path, env=environment(tmp_path, PIDS=str(tmp_path))) as inner:
        deadline = time.monotonic() + _LIMIT_S
        files = [tmp_path / "0", tmp_path / "1"]
        while not all(file.exists() and file.read_text().endswith("\n") for file in files):
            assert _is_alive(inner.pid)
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(inner.pid, sig)
        inner.wait()
    pids = [int(pid) for file in files for pid in file.read_text().split()]
    while left := [pid for pid in pids if _is_alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def test_pdb_opens_on_the_rank_that_failed_and_quitting_it_ends_the_session(forked, tmp_path):
    terminal, theirs = pty.openpty()
    run = arguments("inner_few.py", "--pdb", "-k", "test_fails_last")
    said, asked = b"", [b"p 'value', secret\n", b"quit\n"]
    deadline = time.monotonic() + _LIMIT_S
    options = {"cwd": tmp_path, "env": environment(tmp_path, TERM="dumb"), "stdin": theirs, "stdout": theirs}
    with forked.start(*run, **options) as inner:
        os.close(theirs)
        while time.monotonic() < deadline:
            if asked and said.endswith(b"(Pdb) "):
                os.write(terminal, asked.pop(0))
            if select.select([terminal], [], [], 1)[0]:
                try:
                    said += os.read(terminal, 65536)
                except OSError:  # it has ended
                    break
        code = inner.wait()
    os.close(terminal)
    assert b"('value', 17)" in said
    assert re.search(rb"rank \d \(pid \d+\)\r\n(?s:.*)entering PDB", said)
    assert b"Quitting debugger" in said
    assert said.count(b"entering PDB") == 1
    assert code == 2
