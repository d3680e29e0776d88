"""A script that ends in the middle of random work of several threads. Run by test_ends.py, on two ranks.

``python ending.py SEED`` runs rank RANK of two. ``python ending.py --serve`` reads lines of two "SEED RANK FOLDER" and
forks a process for each, whose interpreter ends as any other does; it prints "SEED RANK CODE" of each that has ended.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass, field

RAISED = "the script's own error"
ENDS = ("falls off", "exits", "raises", "_exits", "SIGTERM", "handles SIGTERM", "destroys")
OPERATIONS = (
    "all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", "gather", "scatter",
    "message", "batch", "coalesced", "objects", "monitored_barrier", "functional", "communicator", "ddp",
)  # fmt: skip
ASYNCHRONOUS = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
FORMS = ("blocks", "waits", "leaves", "drops", "asks", "then", "awaits")
SIZES = (1, 1000, 100_000, 500_000)


@dataclass
class Plan:
    """What both ranks know of a run; the seed alone decides."""

    seed: int
    way: str = "named"  # named, replaced: in Gloo's place
    between_hosts: bool = False
    shares_world: bool = False
    threads: list[bool] = field(default_factory=list)  # beside the main one; whether each is a daemon
    ends: list[str] = field(default_factory=list)  # of each rank
    exits_with: list[int] = field(default_factory=list)
    num_steps: list[int] = field(default_factory=list)  # that each rank's main thread takes before its end

    @classmethod
    def of(cls, seed: int) -> Plan:
        own = random.Random(f"plan {seed}")
        return cls(
            seed,
            way=own.choice(["named", "named", "replaced"]),
            between_hosts=own.random() < 0.25,
            shares_world=own.random() < 0.2,
            threads=[own.random() < 0.8 for _ in range(own.choice([0, 1, 1, 2, 3]))],
            ends=[own.choice(ENDS) for _ in range(2)],
            exits_with=[own.randrange(2, 100) for _ in range(2)],
            num_steps=[own.choice([0, 1, 5, 20]) for _ in range(2)],
        )

    def code(self, rank: int) -> int:
        """Return the exit code that the script gives itself; negative for a signal."""
        own = self.exits_with[rank]
        codes = {"falls off": 0, "destroys": 0, "raises": 1, "SIGTERM": -signal.SIGTERM}
        return codes.get(self.ends[rank], own)


class Work:
    """The random operations of one thread, the same on both ranks, in a group of its own or in the world's."""

    def __init__(self, plan: Plan, number: int, group: object) -> None:
        self.random = random.Random(f"work {plan.seed} {number}")
        self.group = group
        self.rank = dist.get_rank()
        self.kept: list[object] = []
        self.model: object = None

    def step(self) -> None:
        operation = self.random.choice(OPERATIONS)
        form = self.random.choice(FORMS)
        tensor = torch.ones(self.random.choice(SIZES))
        if operation in ASYNCHRONOUS:
            work = self._start(operation, tensor, asynchronous=form != "blocks")
            if work is not None:
                self._treat(work, form)
        else:
            getattr(self, f"_{operation}")(tensor, form)
        del self.kept[:-20]

    def _treat(self, work, form: str) -> None:
        if form == "waits":
            work.wait()
        elif form == "leaves":
            self.kept.append(work)
        elif form == "asks":
            self.kept.append(work.get_future())
        elif form == "then":
            self.kept.append(work.get_future().then(lambda done: [one + 1 for one in done.value() or []]))
        elif form == "awaits":
            work.get_future().wait()

    def _start(self, operation: str, x, *, asynchronous: bool):
        both = [torch.empty_like(x), torch.empty_like(x)]
        options = {"group": self.group, "async_op": asynchronous}
        if operation == "barrier":
            return dist.barrier(**options)
        if operation in ("broadcast", "reduce"):
            return getattr(dist, operation)(x, 0, **options)
        if operation == "all_gather":
            return dist.all_gather(both, x, **options)
        if operation == "reduce_scatter":
            return dist.reduce_scatter(x, both, **options)
        if operation == "all_to_all":
            return dist.all_to_all(both, [x, x + 1], **options)
        return dist.all_reduce(x, **options)

    def _gather(self, x, form: str) -> None:
        dist.gather(x, [torch.empty_like(x) for _ in range(2)] if self.rank == 0 else None, 0, group=self.group)

    def _scatter(self, x, form: str) -> None:
        dist.scatter(x, [torch.ones_like(x) for _ in range(2)] if self.rank == 0 else None, 0, group=self.group)

    def _message(self, x, form: str) -> None:
        if form == "blocks":
            (dist.send if self.rank == 0 else dist.recv)(x, 1 - self.rank, group=self.group)
        else:
            self._treat((dist.isend if self.rank == 0 else dist.irecv)(x, 1 - self.rank, group=self.group), form)

    def _batch(self, x, form: str) -> None:
        peer = 1 - self.rank
        messages = [
            dist.P2POp(dist.isend, x, peer, self.group),
            dist.P2POp(dist.irecv, torch.empty_like(x), peer, self.group),
        ]
        for work in dist.batch_isend_irecv(messages):
            self._treat(work, form)

    def _coalesced(self, x, form: str) -> None:
        with dist._coalescing_manager(group=self.group, async_ops=form != "blocks") as works:
            for _ in range(3):
                dist.all_reduce(x, group=self.group)
        if form != "blocks":
            works.wait()

    def _objects(self, x, form: str) -> None:
        dist.all_gather_object([None, None], {"of": self.rank}, group=self.group)
        dist.broadcast_object_list([self.rank], 0, group=self.group)

    def _monitored_barrier(self, x, form: str) -> None:
        dist.monitored_barrier(group=self.group)

    def _functional(self, x, form: str) -> None:
        total = functional.all_reduce(x, "sum", self.group)
        self.kept.append(total if form in ("leaves", "asks") else total + 1)

    def _communicator(self, x, form: str) -> None:
        phalanx.communicator(self.group).all_reduce(x)

    def _ddp(self, x, form: str) -> None:
        if self.model is None:
            wrap = torch.nn.parallel.DistributedDataParallel
            self.model = wrap(torch.nn.Linear(64, 64), process_group=self.group)
        self.model(torch.ones(8, 64)).sum().backward()


def work_on(work: Work, num_steps: int | None) -> None:
    """Take steps, for ever if there is no number of them. What fails is over: a rank that has ended fails them all."""
    for number in itertools.count():
        if number == num_steps:
            return
        try:
            work.step()
        except (RuntimeError, ValueError, OSError):
            if num_steps is not None or work.random.random() < 0.5:
                return
            time.sleep(0.001)


def run(plan: Plan, rank: int, store: object) -> None:
    """Begin the work of a plan; on return, the script ends as the plan says."""
    name = "phalanx"
    if plan.way == "replaced":
        phalanx.replace_gloo()
        name = "gloo"
    if plan.between_hosts:
        os.environ["PHALANX_HOST"] = f"host-{rank}"
    torch.set_num_threads(1)
    dist.init_process_group(name, **store)
    if plan.ends[rank] == "handles SIGTERM":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(plan.exits_with[rank]))
    threads = []
    for number, daemon in enumerate(plan.threads):
        group = dist.group.WORLD if plan.shares_world else dist.new_group()
        args = (Work(plan, number, group), None if daemon else 10)
        threads.append(threading.Thread(target=work_on, args=args, daemon=daemon))
    for thread in threads:
        thread.start()
    main = Work(plan, 99, dist.group.WORLD)
    KEPT.append(main)  # to the end, as a script's own names are
    work_on(main, plan.num_steps[rank])
    end = plan.ends[rank]
    if end in ("SIGTERM", "handles SIGTERM"):
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    if end == "exits":
        sys.exit(plan.exits_with[rank])
    if end == "_exits":
        os._exit(plan.exits_with[rank])
    if end == "raises":
        raise ValueError(RAISED)
    if end == "destroys":
        dist.destroy_process_group()


KEPT: list[Work] = []


def serve() -> tuple[int, int, str] | None:
    """Fork a process for each line, and return in it what the line says; None when there are no more."""
    running: dict[int, str] = {}
    for line in sys.stdin:
        for one in line.split(";"):
            seed, rank, folder = one.split()
            if (pid := os.fork()) == 0:
                os.dup2(os.open(f"{folder}/errors-{rank}", os.O_CREAT | os.O_WRONLY), 2)
                os.dup2(os.open(os.devnull, os.O_RDWR), 1)
                return int(seed), int(rank), folder
            running[pid] = f"{seed} {rank}"
        while running:
            pid, status = os.wait()
            print(running.pop(pid), os.waitstatus_to_exitcode(status), flush=True)
    return None


if __name__ == "__main__":
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional

    import phalanx

    if sys.argv[1:] == ["--serve"]:
        import torch._dynamo  # what the first DistributedDataParallel imports

        import phalanx.backend.groups  # what the first group does

        if (asked := serve()) is not None:
            seed_, rank_, folder_ = asked
            meet = {"init_method": f"file://{folder_}/meet", "rank": rank_, "world_size": 2}
            run(Plan.of(seed_), rank_, meet)
    else:
        with contextlib.suppress(KeyError):
            sys.argv.append(os.environ["RANK"])
        run(Plan.of(int(sys.argv[1])), int(sys.argv[2]), {})
