"""Ranks that hang are named with their lines, on each backend and under each launcher, within two seconds."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.diagnose.stacks import find_py_spy
from phalanx.diagnose.why.clauses import MOMENT_S
from phalanx.host.kernel import Stand, stand_of
from phalanx.host.processes import descendants, processes_of
from phalanx.record.box import box_of_process
from tests.diagnose.asked import asked
from tests.launch.jobs import await_line

pytestmark = pytest.mark.usefixtures("warm_jobs")

SCRIPT = Path(__file__).with_name("hanging.py")
PHALANX = [sys.executable, "-m", "phalanx"]
LAUNCHERS = {
    "phalanx run": [*PHALANX, "run"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
}
NUM_RANKS = 3
ANSWER_S = 2.0
HANGS = {
    "missing_call": ("write_summary", "asleep", "Event.wait"),
    "early_return": ("return_early", "asleep", "Event.wait"),
    "swallowed_exception": ("report_bad_batch", "asleep", "Event.wait"),
    "stopped": ("stopped", "stopped", "has been stopped (SIGSTOP or Ctrl-Z)"),
    "gil_held": ("gil_held", "gil", "native code that holds the GIL"),
    "gil_held_by_thread": ("hold_gil", "starved", "thread holder holds while it sleeps in hold_gil"),
    "native_wait": ("native_wait", "asleep", "has been sleeping"),
    "lock_inversion": ("lock_inversion", "lock", "thread backwards waits for one in lock_backwards"),
    "starved_loader": ("starved_loader", "loader", "is in read"),
    "stopped_worker": ("stopped_worker", "loader", "has been stopped in read"),
    "dead_worker": ("dead_worker", "asleep", "ApplyResult.get"),
    "disk_wait": ("disk_wait", "asleep", "has been opening a file"),
    "deep_recursion": ("deep_recursion", "asleep", "501 calls deep"),
    "infinite_loop": ("infinite_loop", "runs", "is running"),
    "reads_input": ("reads_input", "input", "has been reading its input"),
    "at_breakpoint": ("at_breakpoint", "breakpoint", "has been at a breakpoint"),
    "wrong_order": ("wrong_order", "", "all ranks of a group must make the same calls in the same order"),
}
"""Function in which each hangs, how, and words that tell of it. The last can't be let go."""
LINES = {
    found[1]: number
    for number, line in enumerate(SCRIPT.read_text().splitlines(), 1)
    if (found := re.search(r"# hangs: (\w+)", line))
}
needs_py_spy = pytest.mark.skipif(not find_py_spy(), reason="py-spy is not installed")


class Job:
    """A job of `hanging.py`, which hangs as planned, once after the other."""

    def __init__(self, folder: Path, launcher: str, backend: str, plan: dict[str, int]) -> None:
        self.folder, self.plan = folder, plan
        self.descriptors: list[int] = []
        self.said = self.fifo("said")
        self.pids: dict[int, int] = {}
        steps = [f"{name}:{rank}" for name, rank in plan.items()]
        words = [*LAUNCHERS[launcher], "--nproc-per-node", str(NUM_RANKS)]
        with open(folder / "printed", "wb") as printed:
            self.process = subprocess.Popen(
                [*words, SCRIPT, backend, folder, *steps],
                cwd=folder, stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.ended = os.pidfd_open(self.process.pid)
        self.descriptors.append(self.ended)

    def fifo(self, name: str) -> int:
        with contextlib.suppress(FileExistsError):
            os.mkfifo(self.folder / name)
        self.descriptors.append(os.open(self.folder / name, os.O_RDWR))
        return self.descriptors[-1]

    def wait_until_hung(self, name: str) -> None:
        """Wait until all ranks have begun this step, and whoever hangs in it has come to rest."""
        said = b""
        while said.count(b"\n") < NUM_RANKS:
            is_there, _, _ = select.select([self.said, self.ended], [], [], 90)
            assert is_there == [self.said], (self.folder / "printed").read_text()
            said += os.read(self.said, 1000)
        self.pids = {rank: pid for pid, rank in (map(int, line.split()) for line in said.splitlines())}
        deadline = time.monotonic() + 30
        while not self.has_hung(name):
            assert time.monotonic() < deadline, name
            time.sleep(0.01)
        if name == "wrong_order":
            time.sleep(MOMENT_S)  # of a shorter wait, the ranks are accused of nothing

    def has_hung(self, name: str) -> bool:
        stands = {rank: stand_of(pid) for rank, pid in self.pids.items()}
        culprit = stands.pop(self.plan[name])
        if name == "stopped":
            return culprit.state == "T"
        if name == "infinite_loop":
            return culprit.state == "R" and all(stand.state == "S" for stand in stands.values())
        if name == "wrong_order" and any(map(box_of_process, self.pids.values())):  # it waits too, and looks about
            return all(map(is_in_a_call, self.pids.values()))
        if name == "gil_held_by_thread":  # the main thread may ask for the GIL, again and again
            return any(stand.path.endswith("/native") for stand in threads_of(self.pids[self.plan[name]]))
        if name in ("starved_loader", "stopped_worker") and not self.worker_has_hung(name):
            return False
        return (
            culprit.state == "S"
            and (culprit.still_s or 0) > 0.2
            and all(stand.state == "S" for stand in stands.values())
        )

    def worker_has_hung(self, name: str) -> bool:
        """Whether the process that loads data for the rank stands where it is to stay; the rank waits for it before."""
        below = [stand_of(one.pid) for one in descendants(self.pids[self.plan[name]], processes_of(os.geteuid()))]
        return any(one.state == "T" if name == "stopped_worker" else one.path.endswith("/native") for one in below)

    def let_go(self, name: str) -> None:
        pid = self.pids[self.plan[name]]
        if name == "stopped":
            os.kill(pid, signal.SIGCONT)
        elif name == "native_wait":
            os.kill(pid, signal.SIGUSR1)
        elif name == "stopped_worker":
            for process in descendants(pid, processes_of(os.geteuid())):
                if process.state == "T":
                    os.kill(process.pid, signal.SIGCONT)
        elif name == "disk_wait":
            os.close(os.open(self.folder / "disk", os.O_WRONLY))
        elif name in ("gil_held", "gil_held_by_thread", "starved_loader"):
            os.write(self.fifo("native"), b"x" * (1 if name != "starved_loader" else 4))
        elif name in ("reads_input", "at_breakpoint"):
            os.write(self.fifo("input"), b"c\n")
        word = {"lock_inversion": "locks", "dead_worker": "pool"}.get(name, "go on")
        os.write(self.fifo(f"to_{self.plan[name]}"), f"{word}\n".encode())

    def end(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        there = processes_of(os.geteuid())
        left = [of for pid in self.pids.values() for of in (pid, *(one.pid for one in descendants(pid, there)))]
        self.process.send_signal(signal.SIGTERM)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(20)


def threads_of(pid: int) -> list[Stand]:
    """Return where each thread of a process stands."""
    return [stand_of(pid, int(thread)) for thread in os.listdir(f"/proc/{pid}/task")]


def is_in_a_call(pid: int) -> bool:
    """Whether a rank of the phalanx backend has begun a collective that has not ended."""
    calls = [event for event in box_of_process(pid).events if event.kind == "collective"]
    return bool(calls) and not calls[-1].ended_ns


@contextlib.contextmanager
def hanging(folder: Path, launcher: str, backend: str, names: list[str], seed: int) -> Iterator[Job]:
    draw = random.Random(seed)
    job = Job(folder, launcher, backend, {name: draw.randrange(NUM_RANKS) for name in names})
    try:
        yield job
    finally:
        job.end()


def ask(job: Job, *, as_a_command: bool) -> tuple[dict[str, Any], float]:
    """Return what phalanx why says of a job, and how long it would take on an idle machine: the quickest of five."""
    answers = []
    words = ["why", "--json", str(job.process.pid)]
    for _ in range(5):
        begun = time.monotonic()
        if as_a_command:
            done = subprocess.run([*PHALANX, *words], capture_output=True, text=True, timeout=60, check=False)
        else:
            done = asked(".", *words)
        took_s = time.monotonic() - begun
        assert done.returncode == 0, done.stderr
        answers.append((took_s if took_s <= ANSWER_S else took_s / slowness(), done.stdout))
        if answers[-1][0] <= ANSWER_S:
            break
    took_s, told = min(answers)
    return json.loads(told), took_s


def slowness() -> float:
    """Return how many times longer a process takes now than it computes, because others compute as well; at least 1."""
    begun, cpu = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "sum(range(20_000_000))"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return max(1.0, (time.monotonic() - begun) / (after.ru_utime + after.ru_stime - cpu.ru_utime - cpu.ru_stime))


def mistakes(answer: dict[str, Any], name: str, culprit: int) -> list[str]:
    """Return what is wrong about an answer."""
    function, how, words = HANGS[name]
    (doing,) = [one for one in answer["ranks"] if one["rank"] == culprit]
    frame = doing["other"] if name == "gil_held_by_thread" else doing["frame"]
    expected = {
        "culprits": ([culprit], answer["culprits"]),
        "line": (LINES[name], (frame or {}).get("line")),
        "function": (function, (frame or {}).get("function")),
        "how": (how or doing["how"], doing["how"]),
        "words": (True, words in answer["sentence"]),
        "site": (True, f"hanging.py:{LINES[name]}" in answer["sentence"]),
    }
    return [f"{name}: {what} {got!r}, not {want!r}" for what, (want, got) in expected.items() if want != got]


POLLS = """
import ctypes, os, torch, torch.distributed as dist
dist.init_process_group("phalanx")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    libc = ctypes.CDLL(None, use_errno=True)
    events = libc.epoll_create1(0)
    event = ctypes.create_string_buffer(b"\\x01", 12)
    libc.epoll_ctl(events, 1, os.open("let_go", os.O_RDWR), event); print("there", flush=True)
    found = libc.epoll_wait(events, ctypes.create_string_buffer(12), 1, -1)
    print("found", found, flush=True)
dist.all_reduce(torch.ones(1))
"""


@needs_py_spy
def test_a_call_that_a_halt_would_end_is_not_disturbed_unless_native_frames_are_asked_for(tmp_path):
    os.mkfifo(tmp_path / "let_go")
    (tmp_path / "job.py").write_text(POLLS)
    command = [*LAUNCHERS["phalanx run"], "--nproc-per-node", "2", "job.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        await_line(process.stdout, "there")
        deadline = time.monotonic() + 60
        while not re.search("rank 1 has not called all_reduce #2 .* at job.py:10", said := why(process.pid)):
            assert time.monotonic() < deadline, said
        assert re.search(r"native frames: phalanx stacks --native \d+, which would end its epoll_wait early", said)
        (tmp_path / "let_go").write_text("x")
        assert "found 1" in process.communicate(timeout=60)[0]


STUCK = """
import threading, torch, torch.distributed as dist
dist.init_process_group("phalanx")
if dist.get_rank() == 1:
    print("there", flush=True)
    threading.Event().wait()
dist.all_reduce(torch.ones(1))
"""


@needs_py_spy
def test_native_frames_do_not_make_a_wait_shorter(tmp_path):
    (tmp_path / "job.py").write_text(STUCK)
    command = [*LAUNCHERS["phalanx run"], "--nproc-per-node", "2", "job.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            await_line(process.stdout, "there")
            before = until_rank_1_rests(process.pid, lambda seconds: seconds > 1.5)
            assert not before["since_is_least"]
            halted_s = time.monotonic()
            stacks = [*PHALANX, "stacks", "--native", str(process.pid)]
            assert subprocess.run(stacks, capture_output=True, timeout=60, check=False).returncode == 0
            after = until_rank_1_rests(process.pid, lambda _: True)
            after_s = time.monotonic()
        finally:
            process.terminate()
    assert after["since_s"] < after_s - halted_s, "the kernel counts anew"
    assert after["since_is_least"]


def until_rank_1_rests(pid: int, is_fit: Callable[[float], bool]) -> dict[str, Any]:
    """Return what rank 1 does once it is the one whom rank 0 waits for."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        said = asked(".", "why", "--json", pid).stdout
        if said and (answer := json.loads(said))["culprits"] == [1]:
            doing = answer["ranks"][1]
            if doing["since_s"] is not None and is_fit(doing["since_s"]):
                return doing
    raise AssertionError(said)


RESTS = """
import ctypes, socket, struct, sys, threading, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group(sys.argv[1])
rank = dist.get_rank()
gate = open("gate")
def rest():
    print("there", flush=True)
    gate.readline()  # rests
def ddp():
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    for step in range(3):
        if rank == 1 and step == 2: rest()
        model(torch.ones(1, 2)).sum().backward()  # waits
def thread():
    def train():
        if rank == 1: rest()
        dist.all_reduce(torch.ones(1))  # waits
    trainer = threading.Thread(target=train)
    trainer.start()
    trainer.join()
def receives():
    if rank == 1:
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 1000, 0))
        threading.Thread(target=lambda: (gate.readline(), theirs.send(b"x"))).start()
        print("there", flush=True)
        recv, room = ctypes.CDLL(None).recv, ctypes.create_string_buffer(1)
        print("received", recv(ours.fileno(), room, 1, 0), flush=True)  # rests
    dist.all_reduce(torch.ones(1))  # waits
for what in sys.argv[2:]:
    dist.all_reduce(torch.ones(1))
    globals()[what]()
dist.barrier()
dist.destroy_process_group()  # else a thread of Gloo may free a tensor when Python has ended, which aborts
"""
RESTING = {"phalanx": ["ddp", "thread", "receives"], "gloo": ["ddp", "thread"]}


@needs_py_spy
@pytest.mark.parametrize("backend", RESTING)
def test_a_rank_that_rests_is_named_and_for_how_long_and_is_left_alone(tmp_path, backend):
    (tmp_path / "job.py").write_text(RESTS)
    os.mkfifo(tmp_path / "gate")
    gate = os.open(tmp_path / "gate", os.O_RDWR)
    command = [*LAUNCHERS["phalanx run"], "--nproc-per-node", "2", "job.py", backend, *RESTING[backend]]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        try:
            for what in RESTING[backend]:
                await_line(process.stdout, "there")
                (first, *since), *later = lasted = rests_of(process.pid, what)
                for at, *longer in later:
                    for before, after in zip(since, longer, strict=True):
                        assert abs(after - before - (at - first)) < 0.5, (what, lasted)
                os.write(gate, b"\n")
        finally:
            os.close(gate)
        assert process.wait(timeout=60) == 0
        out = process.stdout.read()
        assert ("received 1" in out) == ("receives" in RESTING[backend]), out


def rests_of(pid: int, what: str) -> list[tuple[float, float, float]]:
    """Return thrice the time, and for how long rank 1 rests by then in one of `RESTS` and rank 0 waits for it."""
    lines = RESTS.splitlines()
    begin = lines.index(f"def {what}():")
    body = next(number for number in range(begin + 1, len(lines)) if not lines[number].startswith(" "))
    waits = {number for number in range(begin + 1, body + 1) if "# waits" in lines[number - 1]}
    rests = {number for number, line in enumerate(lines, 1) if "# rests" in line}
    lasted: list[tuple[float, float, float]] = []
    said = ""
    deadline = time.monotonic() + 60
    while len(lasted) < 3:
        assert time.monotonic() < deadline, (what, said)
        said = asked(".", "why", "--json", pid).stdout
        if said and (answer := json.loads(said))["culprits"] == [1] and answer["waiters"] == [0]:
            waiting, resting = answer["ranks"]
            line = (resting["frame"] or {}).get("line")  # None: it could not be read at that moment
            if line in rests and int(waiting["call"]["site"].rpartition(":")[2]) in waits:
                lasted.append((time.monotonic(), resting["since_s"], waiting["call"]["since_s"]))
    return lasted


def why(pid: int) -> str:
    return asked(".", "why", pid).stdout


PAIRS = [("phalanx run", "phalanx"), ("torchrun", "gloo"), ("phalanx run", "gloo"), ("torchrun", "phalanx")]


@needs_py_spy
@pytest.mark.parametrize(
    ("launcher", "backend"),
    [pytest.param(*pair, marks=[pytest.mark.slow] * (pair in PAIRS[2:]), id="-".join(pair)) for pair in PAIRS],
)
def test_each_hang_is_named_with_its_rank_and_line_within_two_seconds(tmp_path, launcher, backend):
    wrong, late, asked_about = [], [], []
    with hanging(tmp_path, launcher, backend, list(HANGS), PAIRS.index((launcher, backend))) as job:
        for name, culprit in job.plan.items():
            job.wait_until_hung(name)
            answer, took_s = ask(job, as_a_command=not asked_about)
            asked_about.append(name)
            if found := mistakes(answer, name, culprit):
                wrong += [*found, answer["sentence"]]
            late += [f"{name}: {took_s:.2f} s"] if took_s > ANSWER_S else []
            print(f"{took_s:.2f} s  {name}: {answer['sentence']}")
            job.let_go(name)
    assert not wrong
    assert not late


def test_a_rank_by_hand_whose_others_have_not_been_started_is_told_so(tmp_path):
    (tmp_path / "half.py").write_text(
        "import torch.distributed as dist; print('there', flush=True)\ndist.init_process_group('gloo')\n"
    )
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    with subprocess.Popen(
        [sys.executable, "half.py"], cwd=tmp_path, env={**os.environ, **place}, stdout=subprocess.PIPE, text=True
    ) as rank:
        try:
            await_line(rank.stdout, "there")
            said = ""
            deadline = time.monotonic() + 60
            while "waits in init" not in said and time.monotonic() < deadline:
                said = asked(tmp_path, "why", rank.pid).stdout
        finally:
            rank.kill()
    assert re.match(
        r"rank 0 began [\d.]+ s ago and waits in init_process_group at half\.py:2; rank 1 of 2 does not run here and "
        r"has not come to it: start it, or ask on its host\n",
        said,
    )
    assert "may well be running" not in said
