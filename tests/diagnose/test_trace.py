"""phalanx trace: one trace of all ranks, right by the format's document, small, quick, and seen by a real browser."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gzip
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx import cli
from phalanx.diagnose.jobs import find_job
from phalanx.diagnose.trace.clocks import align
from phalanx.diagnose.trace.perfetto import make_trace, merged, write_trace
from phalanx.host.ports import ReservedPort
from phalanx.record.box import MEMORY, Box, Event
from tests.browser import needs_browser, run_page
from tests.diagnose.puppets import until
from tests.diagnose.trace_format import check_format
from tests.record.made import MS, Job, looks, save

pytestmark = pytest.mark.usefixtures("warm_jobs")

PHALANX = [sys.executable, "-m", "phalanx"]


def slices(trace: dict, kind: str) -> list[dict]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] == kind]


def test_a_run_of_four_ranks_is_shown_with_its_steps_phases_collectives_and_flows():
    boxes = Job(4, slower={2: 0.3}, seed=1).boxes(20)
    trace = make_trace(boxes)
    check_format(trace)
    assert len(slices(trace, "step")) == len(slices(trace, "collective")) == 80
    assert len(slices(trace, "phase")) == 320
    call = slices(trace, "collective")[0]
    assert call["name"] == "all_reduce"
    assert call["args"] == {"group": "world", "number": 1, "elements": 1000, "line": "train.py:31"}
    starts = [event["pid"] for event in trace["traceEvents"] if event["ph"] == "s"]
    assert len(starts) == 60 == trace["otherData"]["flows"]
    assert starts.count(2) > 50, "rank 2 is the last to come to nearly all"


def test_what_overlaps_without_nesting_is_shown_on_a_track_of_its_own():
    times = [(0, 100), (10, 50), (20, 70), (60, 90), (80, 120)]
    events = tuple(
        Event(number, begun * MS, ended * MS, "collective", "all_reduce", "world", "", 1000, number, 1)
        for number, (begun, ended) in enumerate(times, 1)
    )
    trace = make_trace([Box(0, 1, 1000, 5, "host", 0, 5, events)])
    check_format(trace)
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert names == {"main thread", "main thread (overlapping)"}


def test_a_call_without_an_end_is_shown_as_a_mark():
    call = Event(1, 5 * MS, 5 * MS + 900, "call", "all_reduce", "default", "train.py:31", 1000, 7, 4)
    trace = make_trace([Box(0, 1, 1000, 5, "host", 0, 1, (call,))])
    check_format(trace)
    (mark,) = [event for event in trace["traceEvents"] if event["ph"] == "i"]
    assert (mark["name"], mark["cat"]) == ("all_reduce", "call")
    assert mark["args"] == {"group": "default", "number": 7, "elements": 4, "line": "train.py:31"}


def test_memory_is_shown_as_a_counter():
    events = tuple(
        Event(number, number * MS, number * MS, "note", "", MEMORY, "", 1000, 0, number << 20) for number in range(1, 4)
    )
    trace = make_trace([Box(0, 1, 1000, 5, "host", 0, 5, events)])
    check_format(trace)
    assert [event["args"] for event in trace["traceEvents"] if event["ph"] == "C"] == [{"MiB": n} for n in (1, 2, 3)]


def test_what_has_not_ended_lasts_to_the_end_of_the_trace():
    boxes = Job(2, seed=2).boxes(5)
    (*_, last) = boxes[0].events
    cut = [boxes[0].with_events([*boxes[0].events[:-1], last._replace(ended_ns=0)]), boxes[1]]
    trace = make_trace(cut)
    check_format(trace)
    (hanging,) = [event for event in slices(trace, "collective") if event["args"].get("unfinished")]
    assert hanging["pid"] == 0
    assert hanging["ts"] + hanging["dur"] == pytest.approx(max(e["ts"] + e["dur"] for e in slices(trace, "collective")))


@pytest.mark.parametrize(
    "damage",
    [
        lambda trace: trace["traceEvents"].append({"ph": "X", "name": "x"}),
        lambda trace: trace["traceEvents"].append(dict(trace["traceEvents"][-1])),
        lambda trace: slices(trace, "collective")[0].update(dur=1e3),
        lambda trace: next(e for e in trace["traceEvents"] if e["ph"] == "f").update(ts=0.0),
    ],
)
def test_the_checker_sees_what_is_wrong(damage):
    trace = copy.deepcopy(make_trace(Job(2, seed=3).boxes(10)))
    check_format(trace)
    damage(trace)
    with pytest.raises((AssertionError, KeyError)):
        check_format(trace)


@pytest.mark.parametrize("error_us", [0, 400, 50_000, -3_000_000])
def test_hosts_whose_times_of_day_differ_are_put_right_by_their_collectives(error_us):
    boxes = Job(4, hosts=["a", "a", "b", "b"], seed=4).boxes(200)
    shift = boxes[2].realtime_less_monotonic_ns - boxes[0].realtime_less_monotonic_ns
    wrong = [
        dataclasses.replace(box, realtime_less_monotonic_ns=box.realtime_less_monotonic_ns + error_us * 1000)
        if box.host == "b" else box
        for box in boxes
    ]  # fmt: skip
    clock = align(wrong)["b"]
    assert abs(clock.shift_ns - shift) <= clock.within_ns
    assert clock.within_ns < 40 * MS
    assert clock.by == ("collectives" if abs(error_us) > 20_000 else "time of day")
    trace = make_trace(wrong)
    check_format(trace)
    assert trace["otherData"]["clocks"][1]["within_us"] == clock.within_ns / 1e3


@pytest.mark.parametrize(("within_ms", "from_rank"), [(1, 3), (30, 1)], ids=["surely", "perhaps"])
@pytest.mark.parametrize("who_measured", ["a", "b"])
def test_an_arrow_comes_from_another_host_if_its_rank_was_later_for_sure(who_measured, within_ms, from_rank):
    # Rank 3 is 20 ms late each time, and rank 1, on the host of those that wait, 5 ms.
    boxes = Job(4, slower={1: 0.5, 3: 2.0}, hosts=["a", "a", "b", "b"], jitter=0, pauses=0).boxes(20)
    ahead_ns = boxes[0].realtime_less_monotonic_ns - boxes[2].realtime_less_monotonic_ns
    measured = {"a": {"b": (ahead_ns, within_ms * MS)}} if who_measured == "a" else {}
    measured |= {"b": {"a": (-ahead_ns, within_ms * MS)}} if who_measured == "b" else {}
    trace = make_trace(boxes, measured)
    check_format(trace)
    told = {"host": "b", "within_us": within_ms * 1e3, "by": "heartbeats"}
    assert trace["otherData"]["clocks"][1] == told
    arrows = [event for event in trace["traceEvents"] if event["ph"] in "sf"]
    ends = [(start["pid"], end["pid"]) for start, end in zip(arrows[::2], arrows[1::2], strict=True)]
    assert [start for start, end in ends if end == 0] == [from_rank] * 20
    assert (3, 2) in ends


def test_hosts_without_a_common_collective_are_related_by_the_time_of_day():
    a, b = Job(2, hosts=["a", "b"], seed=5).boxes(3)
    clock = align([a.with_events([]), b])["b"]
    assert clock.shift_ns == b.realtime_less_monotonic_ns - a.realtime_less_monotonic_ns
    assert make_trace([a.with_events([]), b])["otherData"]["clocks"][1]["within_us"] is None


def test_several_looks_at_a_running_job_make_one_trace():
    boxes = Job(2, seed=6).boxes(60)
    assert merged(looks(boxes, 100 * MS)) == boxes


def thousand_steps() -> list[Box]:
    return Job(4, slower={1: 0.05}, seed=7).boxes(1000)


def test_a_thousand_steps_on_four_ranks_are_written_in_seconds_and_small(tmp_path):
    boxes, began_s = thousand_steps(), time.process_time()
    about = write_trace(boxes, tmp_path / "trace.json.gz")
    assert time.process_time() - began_s < 10
    assert (tmp_path / "trace.json.gz").stat().st_size < 2 << 20
    trace = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    check_format(trace)
    assert (about["slices"], about["flows"]) == (24_000, 3000)


COUNT = """
<script>
const trace = JSON.parse(document.getElementById("trace").textContent);
const open = new Map(), found = {processes: new Set(), slices: 0, flows: 0, longest: 0};
for (const event of trace.traceEvents) {
  found.processes.add(event.pid);
  if (event.ph === "X") { found.slices++; found.longest = Math.max(found.longest, event.dur); }
  if (event.ph === "s") open.set(event.id, event);
  if (event.ph === "f" && open.has(event.id) && open.get(event.id).ts <= event.ts) found.flows++;
}
document.body.textContent = JSON.stringify({...found, processes: found.processes.size});
</script>
"""


@needs_browser
def test_a_browser_reads_the_trace_of_a_thousand_steps_and_finds_the_flows(tmp_path):
    write_trace(thousand_steps(), tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    assert "</" not in text
    found = run_page(tmp_path, f'<script id="trace" type="application/json">{text}</script>{COUNT}')
    assert (found["processes"], found["slices"], found["flows"]) == (4, 24_000, 3000)
    assert 10_000 < found["longest"] < 100_000


SCRIPT = """
import sys, time
import torch
import torch.distributed as dist

dist.init_process_group("phalanx")
store = dist.distributed_c10d._get_default_store()
for step in range(int(sys.argv[1])):
    if dist.get_rank() == 0: store.set("begun", str(step))
    while int(store.get("begun")) < step: time.sleep(0.001)
    time.sleep(0.05 * dist.get_rank())  # rank 1 comes last
    dist.all_reduce(torch.ones(5))
"""
LINE = f"train.py:{SCRIPT.count(chr(10))}"


@pytest.fixture
def script(tmp_path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def traced(folder: Path, *arguments: str) -> tuple[str, dict]:
    done = subprocess.run(
        [*PHALANX, "trace", *arguments, "--out", "out.json"], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done
    trace = json.loads((folder / "out.json").read_text())
    check_format(trace)
    return done.stdout, trace


def test_a_run_that_is_over_is_traced_from_any_of_its_folders(script):
    command = [*PHALANX, "run", "--nproc-per-node", "2", "train.py", "20"]
    subprocess.run(command, cwd=script, capture_output=True, timeout=120, check=True)
    (run,) = script.glob("logs/train/*")
    (attempt,) = run.glob("blackbox/*")
    for folder in ("logs", "logs/train", str(run), str(attempt), "train.py"):
        said, trace = traced(script, folder)
        assert said.startswith("out.json: 2 ranks, ")
        assert {event["args"].get("line") for event in slices(trace, "collective")[1:]} >= {LINE}
        from_last = [event["pid"] for event in trace["traceEvents"] if event["ph"] == "s"]
        assert from_last.count(1) >= 19


@pytest.mark.parametrize("what", ["PID", "logs/train"])
def test_a_running_job_is_traced_with_what_came_before_and_for_some_seconds(script, what):
    command = [*PHALANX, "run", "--nproc-per-node", "2", "train.py", "100000"]
    with subprocess.Popen(command, cwd=script, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as job:
        try:
            deadline, num_traced = time.monotonic() + 60, 0
            while time.monotonic() < deadline and num_traced < 2:  # in the first one the ranks may just have begun
                done = subprocess.run(
                    [*PHALANX, "trace", what.replace("PID", str(job.pid)), "--seconds", "1", "--out", "out.json"],
                    cwd=script, capture_output=True, text=True, timeout=60,
                )  # fmt: skip
                num_traced += done.returncode == 0 and " 2 ranks, " in done.stdout
            trace = json.loads((script / "out.json").read_text())
        finally:
            job.terminate()
    check_format(trace)
    found = slices(trace, "collective")
    assert {event["pid"] for event in found} == {0, 1}
    assert found[0]["name"] == "join", "what came before the command is there"
    lasted_s = (max(event["ts"] for event in found) - found[0]["ts"]) / 1e6
    assert lasted_s > 1, "and so is what came after it"


def test_of_a_job_that_records_nothing_yet_an_earlier_attempt_is_taken_and_named(script, monkeypatch, capsys):
    monkeypatch.chdir(script)
    command = [*PHALANX, "run", "--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "train.py", "9"]
    with contextlib.closing(ReservedPort()) as port:
        job = subprocess.Popen(
            [*command[:-2], "--master-port", str(port.port), *command[-2:]], stderr=subprocess.DEVNULL
        )
        with job:
            try:
                found = until(lambda: find_job(str(job.pid)), lambda found: found.folder)
                save(Job(2, seed=1).boxes(5), Path(found.folder) / "blackbox/attempt_0")
                assert cli.main(["trace", str(job.pid)]) == 0
                said = capsys.readouterr()
                assert said.err.startswith(
                    f"phalanx trace: no rank of train.py runs here yet (phalanx run, pid {found.launcher_pid}): "
                )
                assert said.err.endswith(f"; so this is {found.folder}/blackbox/attempt_0\n")
                assert cli.main(["trace", str(job.pid), "--seconds", "1"]) == 1
            finally:
                job.terminate()


def test_of_runs_without_a_record_an_older_one_is_taken_and_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save(Job(2, seed=1).boxes(5), tmp_path / "logs/train/20260101-000000-1/blackbox/attempt_0")
    (tmp_path / "logs/train/20260101-000000-1/attempt_0/rank_0").mkdir(parents=True)
    assert cli.main(["trace", "logs/train"]) == 0
    assert "has no record" not in capsys.readouterr().err
    (tmp_path / "logs/train/20260102-000000-2/attempt_0/rank_0").mkdir(parents=True)
    assert cli.main(["trace", "logs/train"]) == 0
    assert capsys.readouterr().err == (
        "phalanx trace: logs/train/20260102-000000-2 has no record, so this is logs/train/20260101-000000-1\n"
    )
    save(Job(2, seed=1).boxes(5), tmp_path / "logs/train/20260102-000000-2/blackbox/attempt_0")
    assert cli.main(["trace", "logs"]) == 0
    assert capsys.readouterr().err == (
        "phalanx trace: 'logs' holds 2 runs; this is the newest, logs/train/20260102-000000-2\n"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seconds", "0"], "--seconds must be more than 0 and at most 3,600, got 0"),
        (["here", "--seconds", "3"], "--seconds is for running jobs"),
        (["here"], "no black box in 'here': they are saved when an attempt of phalanx run is over"),
        (["no.py", "here"], "'no.py' is not a run's folder"),
        (["a.py", "b.py"], "'a.py' is not a run's folder; several arguments must all be folders"),
        (["999999999"], "there is no process 999999999"),
        (["torn"], "can't be read: "),
    ],
)
def test_what_cannot_be_traced_is_said(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "rank_0.box").write_bytes(random.Random(1).randbytes(500))
    assert cli.main(["trace", *arguments]) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert said.out == ""
    assert not list(tmp_path.glob("trace*"))


def test_a_copy_of_a_box_is_named_and_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save(Job(2, seed=1).boxes(5), tmp_path / "attempt_0")
    shutil.copy("attempt_0/rank_1.box", "attempt_0/rank_1-old.box")
    assert cli.main(["trace", "attempt_0"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("trace.json.gz: 2 ranks, ")
    copy = "attempt_0/rank_1-old.box holds the black box of rank 1, as rank_1.box does: delete the copy"
    assert said.err == f"phalanx trace: {copy}; the trace lacks it\n"


def test_an_earlier_trace_is_not_overwritten_unless_it_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save(Job(2, seed=1).boxes(5), tmp_path / "attempt_0")
    names = []
    for arguments in ([], [], ["--out", "trace.json.gz"], []):
        assert cli.main(["trace", "attempt_0", *arguments]) == 0
        names.append(capsys.readouterr().out.partition(":")[0])
    assert names == ["trace.json.gz", "trace-2.json.gz", "trace.json.gz", "trace-3.json.gz"]


def test_a_name_that_would_control_a_terminal_is_escaped(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save(Job(2, seed=1).boxes(5), tmp_path / "attempt_0")
    name, shown = "o\n\x1b[31m", "o\\n\\x1b[31m"
    assert cli.main(["trace", "attempt_0", "--out", f"{name}.json"]) == 0
    assert capsys.readouterr().out.startswith(f"{shown}.json: 2 ranks, ")
    (tmp_path / name).mkdir()
    for refused in (["attempt_0", "--out", f"no{name}/trace.json"], [name], ["attempt_0", f"no{name}"]):
        assert cli.main(["trace", *refused]) == 2
        assert "\x1b" not in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_named_with_the_reason(tmp_path, capsys):
    save(Job(2, seed=1).boxes(5), tmp_path / "attempt_0")
    out = tmp_path / "no" / "trace.json"
    assert cli.main(["trace", str(tmp_path / "attempt_0"), "--out", str(out)]) == 2
    assert capsys.readouterr().err == (
        f"phalanx trace: can't write '{out}': No such file or directory; name another file with --out\n"
    )
