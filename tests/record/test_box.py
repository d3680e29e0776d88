"""What ranks record is there for others: while they run, after they have been killed, and on another day."""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx import _core
from phalanx.record.box import BOX_BYTES, Box, Tail, box_of_process, load_box, load_boxes, read_box, save_boxes
from phalanx.testing import run_ranks
from tests.limited import limited_files
from tests.record.made import Job, encoded

pytestmark = pytest.mark.usefixtures("warm_jobs")

PHALANX = [sys.executable, "-m", "phalanx"]
SCRIPT = """
import os, sys
import torch
import torch.distributed as dist

dist.init_process_group("phalanx")
for _ in range(3):
    dist.all_reduce(torch.ones(5))
dist.broadcast(torch.ones(7), 1)  # the last
if "die" in sys.argv:
    os.kill(os.getpid(), 9)
"""
LINE = next(n for n, line in enumerate(SCRIPT.splitlines(), 1) if "the last" in line)


def run_script(folder: Path, *arguments: str, script: str = SCRIPT) -> list[Box]:
    (folder / "train.py").write_text(script)
    subprocess.run(
        [*PHALANX, "run", "--nproc-per-node", "2", "--log-dir", "runs", "train.py", *arguments],
        cwd=folder, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    (saved,) = folder.glob("runs/*/blackbox/attempt_0")
    return load_boxes(saved).boxes


def test_a_box_names_its_host_as_it_was_called(tmp_path, monkeypatch):
    monkeypatch.setenv("PHALANX_HOST", "left")
    assert {box.host for box in run_script(tmp_path)} == {"left"}


@pytest.mark.parametrize("arguments", [(), ("die",)])
def test_a_job_leaves_what_each_rank_did_last_with_its_line(tmp_path, arguments):
    boxes = run_script(tmp_path, *arguments)
    assert [(one.rank, one.world_size) for one in boxes] == [(0, 2), (1, 2)]
    for one in boxes:
        calls = [event for event in one.events if event.kind == "collective"]
        assert [(call.op, call.seq, call.value) for call in calls[-4:]] == [
            ("all_reduce", 1, 5), ("all_reduce", 2, 5), ("all_reduce", 3, 5), ("broadcast", 4, 7),
        ]  # fmt: skip
        assert calls[-1].site == f"train.py:{LINE}"
        assert calls[-1].begun_ns < calls[-1].ended_ns
        assert [call.begun_ns for call in calls] == sorted(call.begun_ns for call in calls)


def look_at_each_other(rank: int, world_size: int) -> list[str]:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))
    pids = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    seen = box_of_process(pids[1 - rank])
    child = os.fork()
    if child == 0:
        _core.end_event(_core.begin_event(5, 0, "of the child", 0, 0))
        os._exit(0)
    os.waitpid(child, 0)
    own = box_of_process(os.getpid())
    dist.barrier()
    return [str(seen.rank), seen.events[-1].kind, *(event.text for event in own.events if event.kind == "note")]


def test_a_running_rank_is_read_from_outside_and_its_children_do_not_write_for_it():
    assert run_ranks(look_at_each_other, 2) == [["1", "collective"], ["0", "collective"]]


def start_another_job(rank: int, world_size: int) -> list[str]:
    """Start what records as a rank of a job of its own, as torchrun would do: at the head of a session."""
    begin = f"from phalanx.record import writer; writer.begin({rank}, {world_size}); writer.note('of another job')"
    before = box_of_process(os.getpid())
    subprocess.run([sys.executable, "-c", begin], start_new_session=True, check=True)
    after = box_of_process(os.getpid())
    return [event.text for event in after.events[len(before.events) :]]


def test_a_job_that_a_rank_starts_does_not_write_into_its_box():
    assert run_ranks(start_another_job, 2) == [[], []]


def test_a_process_without_a_box_has_none():
    with subprocess.Popen(["sleep", "60"]) as process:
        assert box_of_process(process.pid) is None
        process.kill()


@pytest.fixture
def data(tmp_path) -> bytes:
    script = f"""
import os
from phalanx import _core
fd = os.open({str(tmp_path / "box")!r}, os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, _core.BOX_BYTES)
_core.record_to(fd, 0, 3, 8)
for i in range(9000):
    _core.end_event(_core.begin_event(5, 0, f"note {{i % 10}}", i, 0))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    return (tmp_path / "box").read_bytes()


def test_of_a_ring_that_has_gone_round_the_last_events_are_there_in_order(data):
    assert len(data) == BOX_BYTES == _core.BOX_BYTES
    found = read_box(data)
    assert (found.rank, found.world_size, found.num_events, len(found.events)) == (3, 8, 9000, 8192)
    assert [event.seq for event in found.events] == list(range(9000 - 8192, 9000))
    assert found.events[-1].text == "note 9"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: b"", "it is too short for a black box"),
        (lambda data: b"x" * len(data), "it is no black box"),
        (lambda data: data[:8] + struct.pack("<I", 7) + data[12:], "it is of version 7, and this phalanx"),
        (lambda data: data[: BOX_BYTES // 2], "it is torn"),
        (lambda data: data[:12] + struct.pack("<I", 0) + data[16:], "it is torn"),
    ],
)  # fmt: skip
def test_what_is_no_whole_box_is_refused(data, damage, words):
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        read_box(damage(data))


def test_an_event_that_is_rewritten_or_was_ended_by_an_older_one_is_told_from_a_whole_one(data):
    page, size = 4096, 64
    number, begun = struct.unpack_from("<QQ", data, page + 5 * size)
    being_written = data[: page + 5 * size] + b"\xff" * 8 + data[page + 5 * size + 8 :]
    assert number not in [event.number for event in read_box(being_written).events]
    ended_before = data[: page + 5 * size + 16] + struct.pack("<Q", begun - 1) + data[page + 5 * size + 24 :]
    assert next(event for event in read_box(ended_before).events if event.number == number).ended_ns == 0


def test_a_saved_box_whose_damage_makes_it_longer_is_refused(data, tmp_path):
    (tmp_path / "rank_0.box").write_bytes(gzip.compress(data + b"x", 1)[:-8] + bytes(8))
    with pytest.raises(ValueError, match="it continues past the end of a black box"):
        load_box(tmp_path / "rank_0.box")


def test_a_saved_box_that_is_damaged_is_named(data, tmp_path):
    (tmp_path / "memory").write_bytes(data)
    with open(tmp_path / "memory", "rb") as file:
        (path,) = save_boxes(file.fileno(), tmp_path / "saved")
    assert load_boxes(tmp_path / "saved").boxes == [read_box(data)]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=re.escape(f"{path} can't be read")):
        load_box(path)


def test_a_box_for_which_the_disk_has_no_room_is_not_saved_in_part(data, tmp_path):
    (tmp_path / "memory").write_bytes(data)
    with open(tmp_path / "memory", "rb") as file, limited_files(100), pytest.raises(OSError, match="File too large"):
        save_boxes(file.fileno(), tmp_path / "saved")
    assert list((tmp_path / "saved").iterdir()) == []


@pytest.mark.slow
def test_random_bytes_in_a_box_are_never_an_error_of_another_kind(data):
    seed = 1
    for _ in range(300):
        seed = seed * 6364136223846793005 % 2**64
        at, size = seed % len(data), seed % 97
        damaged = data[:at] + seed.to_bytes(8, "little") * (size // 8 + 1) + data[at + 8 * (size // 8 + 1) :]
        with contextlib.suppress(ValueError):
            assert len(read_box(damaged).events) <= 8192


WRITER = """
import os, sys
from phalanx import _core
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, 2 * _core.BOX_BYTES)
_core.record_to(fd, _core.BOX_BYTES, 3, 8)
hanging = _core.begin_event(4, 0, "hangs", 0, 0)
for line in sys.stdin:
    for i in range(int(line)):
        _core.end_event(_core.begin_event(5, 0, f"note {i % 10}", i, 0))
    print(flush=True)
    if int(line) == 7:
        _core.end_event(hanging)
        print(flush=True)
"""


def test_a_tail_reads_what_is_new_and_what_has_ended_since(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "box")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:

        def write(num_events: int) -> None:
            print(num_events, file=writer.stdin, flush=True)
            writer.stdout.readline()

        write(5)
        with open(tmp_path / "box", "rb") as file:
            tail, few = Tail(file.fileno(), BOX_BYTES), Tail(file.fileno(), BOX_BYTES, most=100)
            assert [event.number for event in tail.read().events] == [1, 2, 3, 4, 5, 6]
            assert few.read() == read_box((tmp_path / "box").read_bytes()[BOX_BYTES:])
            assert [event.text for event in tail.read().events] == ["hangs"]
            write(7)
            writer.stdout.readline()
            found = tail.read()
            assert [event.text for event in found.events[:3]] == ["hangs", "note 0", "note 1"]
            assert all(event.ended_ns for event in found.events)
            assert (len(found.events), tail.read().events) == (8, ())
            write(9000)
            assert [event.number for event in tail.read().events] == list(range(9013 - 8192 + 1, 9014))
            assert [event.number for event in few.read().events] == list(range(8914, 9014))
        writer.stdin.close()


MANY_LINES = """
import os
import phalanx.backend.groups  # which knows what lines are the user's
from phalanx import _core
fd = os.open("box", os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, _core.BOX_BYTES)
_core.record_to(fd, 0, 0, 1)
begin = _core.begin_event
def step():
"""


def test_each_of_many_calls_in_a_function_is_recorded_with_its_line(forked, tmp_path):
    num_lines = 300  # more than those that are remembered together, so some take the place of others
    (tmp_path / "train.py").write_text(MANY_LINES + "    begin(5, 0, '', 0, 0)\n" * num_lines + "step()\n")
    done = forked.run("train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    events = read_box((tmp_path / "box").read_bytes()).events
    first = MANY_LINES.count("\n") + 1
    assert [event.site for event in events] == [f"train.py:{first + number}" for number in range(num_lines)]


def test_a_tail_of_memory_in_which_nobody_writes_has_nothing(tmp_path):
    (tmp_path / "box").write_bytes(bytes(BOX_BYTES))
    with open(tmp_path / "box", "rb") as file:
        assert Tail(file.fileno()).read() is None


def test_a_tail_of_memory_that_is_cut_or_tells_other_sizes_is_torn(tmp_path):
    whole = encoded(Job(2).boxes(60)[1])
    more_text = whole[:16] + b"\xff" * 4 + whole[20:56] + b"\xff" * 4 + whole[60:]
    no_such_rank = whole[:24] + struct.pack("<i", -5) + whole[28:]
    for data in (whole[:3000], whole[: 4096 + 30 * 64 + 17], whole[:-5], more_text, no_such_rank):
        (tmp_path / "box").write_bytes(data)
        with open(tmp_path / "box", "rb") as file, pytest.raises(ValueError, match="torn"):
            Tail(file.fileno()).read()


def test_what_lies_in_the_place_of_a_box_is_no_box(tmp_path):
    os.mkfifo(tmp_path / "rank_0.box")
    with pytest.raises(ValueError, match=r"rank_0\.box can't be read: "):
        load_box(tmp_path / "rank_0.box")
    os.unlink(tmp_path / "rank_0.box")
    (tmp_path / "rank_0.box").write_bytes(gzip.compress(bytes(4 * BOX_BYTES), 1))
    with pytest.raises(ValueError, match="it is no black box"):
        load_box(tmp_path / "rank_0.box")
    os.unlink(tmp_path / "rank_0.box")
    (tmp_path / "rank_0.box").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=r"rank_0\.box can't be read: "):
        load_box(tmp_path / "rank_0.box")


def test_a_saved_box_with_any_bit_flipped_is_whole_or_refused(data, tmp_path):
    (tmp_path / "memory").write_bytes(data)
    with open(tmp_path / "memory", "rb") as file:
        (path,) = save_boxes(file.fileno(), tmp_path)
    saved = path.read_bytes()
    for number in range(200):
        at = 7919 * number % len(saved)
        path.write_bytes(saved[:at] + bytes([saved[at] ^ 1 << number % 8]) + saved[at + 1 :])
        with contextlib.suppress(ValueError):
            assert load_box(path) == read_box(data)


WARNS = """
import sys, warnings, torch, torch.distributed as dist
dist.init_process_group("phalanx")
warnings.warn("the batch is small")
dist.barrier()
"""


def test_a_warning_is_noted_and_shown_as_ever(tmp_path):
    boxes = run_script(tmp_path, script=WARNS)
    for box in boxes:
        assert [event.text for event in box.events if event.kind == "note"] == [
            "UserWarning: the batch is small (train.py:4)"
        ]
    (shown,) = tmp_path.glob("runs/*/attempt_0/rank_0/stderr.log")
    assert "train.py:4: UserWarning: the batch is small\n" in shown.read_text()


FORKS = """
import os, warnings, torch.distributed as dist
from phalanx.record.box import box_of_process
from phalanx.record import writer
dist.init_process_group("phalanx")
if os.fork() == 0:
    writer.begin(0, 1)  # as a training of its own does
    warnings.warn("the batch is small")
    notes = [event.text for event in box_of_process(os.getpid()).events if event.kind == "note"]
    with open(f"noted_{dist.get_rank()}", "w") as file:
        file.write("\\n".join(notes))
    os._exit(0)
os.wait()
"""


def test_a_forked_child_that_records_too_notes_a_warning_once(tmp_path):
    run_script(tmp_path, script=FORKS)
    for rank in range(2):
        assert (tmp_path / f"noted_{rank}").read_text() == "UserWarning: the batch is small (train.py:8)"


LOOPS = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("phalanx")
dist.all_reduce(torch.ones(1))
for number in range(9000):
    exec(compile("dist.barrier()", f"cell_{number}.py", "exec"))
    if number == 5000:
        before = int(open("/proc/self/statm").read().split()[1])
group = dist.new_group([0, 1])
dist.all_reduce(torch.ones(1), group=group)
grown = (int(open("/proc/self/statm").read().split()[1]) - before) * 4
if dist.get_rank() == 1:
    open("grown", "w").write(str(grown))
"""


def test_a_script_that_makes_code_without_end_keeps_the_names_of_groups_and_little_memory(tmp_path):
    box = run_script(tmp_path, script=LOOPS)[1]
    assert int((tmp_path / "grown").read_text()) < 4096  # KiB
    calls = [event for event in box.events if event.kind == "collective"]
    assert (calls[-1].op, calls[-1].text) == ("all_reduce", "1")
    assert [event.site for event in calls if event.op == "barrier"][-1] == ""


def test_a_script_whose_path_is_not_utf_8_is_recorded(tmp_path):
    folder = os.fsencode(tmp_path) + b"/d\xe9"
    os.mkdir(folder)
    script = os.path.join(folder, b"train.py")
    with open(script, "w") as file:
        file.write(SCRIPT)
    command = [*PHALANX, "run", "--nproc-per-node", "2", "--log-dir", "runs", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (saved,) = tmp_path.glob("runs/*/blackbox/attempt_0")
    calls = [event for event in load_boxes(saved).boxes[0].events if event.kind == "collective"]
    assert calls[-1].site == f"d\\udce9/train.py:{LINE}"
