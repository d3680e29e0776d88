"""A script whose ranks hang one after the other, each in another way, until they are let go.

Before each all_reduce, one rank hangs in a function that is named after what has gone wrong; the others wait for it.
The line in which it hangs ends with a comment. Arguments: backend, folder of the FIFOs, and ``NAME:RANK``...
"""

from __future__ import annotations

import ctypes
import multiprocessing.pool
import os
import pdb
import signal
import sys
import threading
from multiprocessing.pool import ApplyResult

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

BACKEND, FOLDER, *PLAN = sys.argv[1:]
go_on = threading.Event()
result: ApplyResult[int] | None = None
locks = threading.Lock(), threading.Lock()


def say(words: str) -> None:
    with open(os.path.join(FOLDER, "said"), "w") as file:
        file.write(words)


def fifo(name: str) -> int:
    """Return a FIFO that can be read without end; the test writes to it."""
    path = os.path.join(FOLDER, name)
    if not os.path.exists(path):
        os.mkfifo(path)
    return os.open(path, os.O_RDWR)


def listen(rank: int) -> None:
    """Let go what hangs, at a word of the test."""
    with open(fifo(f"to_{rank}")) as words:
        for word in words:
            if word == "locks\n":
                locks[0].release()
            elif word == "pool\n" and result is not None:
                result._set(0, (True, 0))
            go_on.set()


# ---- what goes wrong -----------------------------------------------------------------------------------------------


def missing_call() -> None:
    if dist.get_rank() < 0:
        dist.all_reduce(torch.ones(1))
    write_summary()


def write_summary() -> None:
    go_on.wait()  # hangs: missing_call


def early_return() -> None:
    for _ in train():
        return_early()
        return


def train():
    yield
    dist.all_reduce(torch.ones(1))


def return_early() -> None:
    with threading.Lock():
        go_on.wait()  # hangs: early_return


def swallowed_exception() -> None:
    try:
        raise ValueError("a bad batch")
    except ValueError:
        report_bad_batch()


def report_bad_batch() -> None:
    while not go_on.wait(60):  # hangs: swallowed_exception
        pass


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)  # hangs: stopped


def gil_held() -> None:
    ctypes.PyDLL(None).read(fifo("native"), ctypes.create_string_buffer(1), 1)  # hangs: gil_held


def gil_held_by_thread() -> None:
    thread = threading.Thread(target=hold_gil, name="holder")
    thread.start()
    thread.join()


def hold_gil() -> None:
    ctypes.PyDLL(None).read(fifo("native"), ctypes.create_string_buffer(1), 1)  # hangs: gil_held_by_thread


def native_wait() -> None:
    signal.signal(signal.SIGUSR1, lambda *_: None)
    ctypes.CDLL(None).sleep(1000)  # hangs: native_wait


def lock_inversion() -> None:
    one, other = locks
    one.acquire()
    both = threading.Barrier(2)
    threading.Thread(target=lock_backwards, args=(both,), name="backwards").start()
    both.wait()
    other.acquire()  # hangs: lock_inversion


def lock_backwards(both: threading.Barrier) -> None:
    one, other = locks
    other.acquire()
    both.wait()
    one.acquire()
    other.release()


class Slow(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return self.read(index)

    def read(self, index: int) -> int:
        os.read(fifo("native"), 1)  # in a worker: it starves the rank
        return index


class Stopping(Slow):
    def read(self, index: int) -> int:
        if index == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        return index


def starved_loader() -> None:
    batches = iter(DataLoader(Slow(), batch_size=1, num_workers=1))
    next(batches)  # hangs: starved_loader


def stopped_worker() -> None:
    batches = iter(DataLoader(Stopping(), batch_size=4, num_workers=1))
    next(batches)  # hangs: stopped_worker


def dead_worker() -> None:
    global result
    with multiprocessing.pool.Pool(1) as pool:
        result = pool.apply_async(os._exit, (1,))
        result.get()  # hangs: dead_worker


def disk_wait() -> None:
    os.mkfifo(os.path.join(FOLDER, "disk"))
    with open(os.path.join(FOLDER, "disk")):  # hangs: disk_wait
        pass


def deep_recursion(depth: int = 0) -> None:
    if depth < 500:
        deep_recursion(depth + 1)
    else:
        go_on.wait()  # hangs: deep_recursion


def infinite_loop() -> None:
    is_set = go_on.is_set
    while not is_set(): pass  # fmt: skip  # noqa: E701  # hangs: infinite_loop


def read_from_fifo() -> None:
    os.dup2(fifo("input"), 0)
    sys.stdin = os.fdopen(0, closefd=False)


def reads_input() -> None:
    read_from_fifo()
    input()  # hangs: reads_input


def at_breakpoint() -> None:
    read_from_fifo()
    pdb.set_trace()
    go_on.is_set()  # hangs: at_breakpoint


def wrong_order() -> None:
    dist.barrier(groups[1])  # hangs: wrong_order
    dist.barrier(groups[0])


def main(rank: int) -> None:
    for number, (name, culprit) in enumerate(step.split(":") for step in PLAN):
        go_on.clear()
        say(f"{os.getpid()} {rank}\n")
        if rank == int(culprit):
            globals()[name]()
        elif name == "wrong_order":
            dist.barrier(groups[0])
            dist.barrier(groups[1])
        dist.all_reduce(torch.ones(1))
        assert number < len(PLAN)


if __name__ == "__main__":
    dist.init_process_group(BACKEND)
    groups = [dist.new_group(), dist.new_group()]
    threading.Thread(target=listen, args=(dist.get_rank(),), daemon=True).start()
    main(dist.get_rank())
