"""What ranks record beside the core's collectives: steps, phases, notes, and the collectives of several hosts."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import phalanx
from phalanx import _core
from phalanx.record import writer
from phalanx.record.box import MEMORY, Event, box_of_process, boxes_held_by, load_boxes
from phalanx.testing import run_ranks, spawn_ranks

pytestmark = pytest.mark.usefixtures("warm_jobs")


def own_events(*kinds: str) -> list[Event]:
    box = box_of_process(os.getpid())
    assert box is not None
    return [event for event in box.events if event.kind in kinds]


def data() -> TensorDataset:
    return TensorDataset(torch.ones(24, 2), torch.ones(24, 1))


def train(rank: int, world_size: int, folder: str) -> list[tuple[str, str, int, int, bool]]:
    model = nn.Linear(2, 1)
    trainer = phalanx.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss, max_epochs=1,
        global_batch_size=8, num_workers=0, folder=folder,
    )  # fmt: skip
    trainer.fit(data(), data())
    events = own_events("step", "phase")
    assert events[0].site.startswith("tests/record/test_events.py:")
    memory = [event.value for event in own_events("note") if event.text == MEMORY]
    assert memory
    assert all(100 << 20 < size < 10 << 30 for size in memory), "torch alone takes more than 100 MiB"
    return [(event.kind, event.text, event.seq, event.value, event.ended_ns > 0) for event in events]


def test_a_trainer_tells_its_steps_with_their_samples_and_where_each_spends_its_time(tmp_path):
    for events in run_ranks(train, 2, str(tmp_path)):
        assert [(seq, value) for kind, _, seq, value, _ in events if kind == "step"] == [(1, 8), (2, 8), (3, 8)]
        assert all(has_ended for *_, has_ended in events)
        second = [text for kind, text, seq, *_ in events if kind == "phase" and seq == 2]
        assert second == ["load data", "forward", "backward", "optimizer"]
        assert {"evaluate", "checkpoint"} <= {text for _, text, *_ in events}


def train_by_hand(rank: int, world_size: int) -> list[tuple[str, str, int]]:
    model = phalanx.DistributedDataParallel(nn.Linear(2, 1))
    for number, (inputs, _) in enumerate(phalanx.DataLoader(data(), 4, shuffle=False)):
        if number % 3 == 1:
            with model.no_sync():
                model(inputs).sum().backward()  # a part of a step
        else:
            model(inputs).sum().backward()
    with torch.no_grad():
        model(inputs)  # not of a step
    return [(event.kind, event.text, event.seq) for event in own_events("step", "phase")]


def test_a_model_that_is_trained_by_hand_tells_its_steps():
    loading, forward, backward = ("phase", "load data", 0), ("phase", "forward"), ("phase", "backward")
    for events in run_ranks(train_by_hand, 2):
        assert events == [
            loading, ("step", "", 1), (*forward, 1), (*backward, 1),
            loading, ("step", "", 2), (*forward, 2),
            loading, (*forward, 2), (*backward, 2),
            loading,
        ]  # fmt: skip


def join_by_session(rank: int, world_size: int) -> int:
    with phalanx.init("gloo"):
        dist.all_reduce(torch.ones(1))  # Gloo's: nothing knows of it
        model = phalanx.DistributedDataParallel(nn.Linear(2, 1))
        model(torch.ones(4, 2)).sum().backward()
    return len(own_events("step"))


def test_a_session_on_another_backend_records_steps_too():
    assert run_ranks(join_by_session, 2, init=False) == [1, 1]


def reduce_over_hosts(rank: int, world_size: int) -> list[tuple[str, str, int, int, str, bool]]:
    dist.all_reduce(torch.ones(5))
    dist.all_reduce(torch.ones(3, dtype=torch.int64), async_op=True).wait()
    dist.barrier()
    events = [event for event in own_events("collective") if event.op != "join"]
    line = reduce_over_hosts.__code__.co_firstlineno
    return [
        (
            event.op, event.text, event.seq, event.value,
            re.sub(r":(\d+)", lambda found: f" +{int(found[1]) - line}", event.site), event.ended_ns > event.begun_ns,
        )
        for event in events
    ]  # fmt: skip


def test_a_group_of_several_hosts_records_each_collective_once_with_its_own_number():
    file = "tests/record/test_events.py"
    for events in run_ranks(reduce_over_hosts, 3, hosts=(2, 1)):
        assert events == [
            ("all_reduce", "default", 1, 5, f"{file} +1", True),
            ("all_reduce", "default", 2, 3, f"{file} +2", True),
            ("barrier", "default", 3, 0, f"{file} +3", True),
        ]


def reduce_and_wait(rank: int, world_size: int) -> None:
    dist.all_reduce(torch.ones(5))
    phalanx.testing.reached("reduced")
    signal.pause()


def test_whoever_started_ranks_still_holds_the_boxes_of_those_that_were_killed():
    with spawn_ranks(reduce_and_wait, 2) as ranks:
        ranks.wait_until_reached("reduced")
        for rank in range(2):
            ranks.kill(rank, signal.SIGKILL)
        ranks.join()
        boxes = [box for box in boxes_held_by(os.getpid()) if box.pid in ranks.pids]
    assert [(box.rank, box.events[-1].op, box.events[-1].value) for box in boxes] == [
        (0, "all_reduce", 5), (1, "all_reduce", 5),
    ]  # fmt: skip


SCRIPT = """
import sys
import phalanx

with phalanx.init() as session:
    session.barrier()
    if session.rank == 1:
        raise ValueError("no such shard")  # here
    session.barrier()
"""
LINE = next(n for n, line in enumerate(SCRIPT.splitlines(), 1) if "# here" in line)


def test_the_exception_that_ended_a_rank_is_its_last_note(tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2", "--log-dir", "runs", "train.py"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120, check=False)
    (saved,) = tmp_path.glob("runs/*/blackbox/attempt_0")
    notes = [event.text for event in load_boxes(saved).boxes[1].events if event.kind == "note"]
    assert re.fullmatch(rf"ValueError: no such shard, raised at (.*/)?train\.py:{LINE}", notes[-1])


def record_without_room(rank: int, world_size: int, limit: str) -> bool:
    os.environ["PHALANX_RECORD"] = "/proc/1/fd/nothing"
    number, lowered = {
        "descriptors": (resource.RLIMIT_NOFILE, 3),
        "sizes of files": (resource.RLIMIT_FSIZE, 100_000),
    }[limit]
    most = resource.getrlimit(number)
    resource.setrlimit(number, (lowered, most[1]))
    writer.begin(rank, world_size)
    writer.note("nobody reads this")
    resource.setrlimit(number, most)
    return bool(_core.is_recording())


@pytest.mark.parametrize("limit", ["descriptors", "sizes of files"])
def test_a_record_that_cannot_be_kept_is_no_error(limit):
    assert run_ranks(record_without_room, 1, limit, init=False) == [False]
