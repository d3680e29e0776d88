"""Workers of a loader that die: what the rank is told, and that others do their work."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import multiprocessing
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

import phalanx
from tests.data._batches import Stream

NUM_EXAMPLES = 100 if os.environ.get("PHALANX_TEST_LONG") else 8
KILLED = (
    r"DataLoader worker \(pid {pid}\) is killed by signal: Killed\. It was worker {worker} of rank 0, {at}\. "
    r"Probably memory ran out: .* See: phalanx explain dataloader-worker$"
)


class Fatal(Dataset):
    """Item i is i, again and again; some items end their worker, each a number of times.

    Args:
        folder: Folder in which deaths are counted.
        deaths: Number of deaths by item.
        end: Function that ends the process.
        length: Number of items.
        width: Number of elements in an item.
    """

    def __init__(self, folder, deaths, end=None, length=24, width=10):
        self._folder, self._deaths, self._end = str(folder), dict(deaths), end or kill
        self._length, self._width = length, width

    def __len__(self):
        return self._length

    def __getitem__(self, index):
        for number in range(self._deaths.get(index, 0)):
            if is_first(self._folder, f"{index}-{number}"):
                self._end()
        return torch.full((self._width,), index)


class FatalWithPages(Fatal):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def is_first(folder, name):
    """Whether nobody has called this before with that name."""
    try:
        os.close(os.open(f"{folder}/{name}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def segfault():
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # torch's handler prints and does the same
    os.kill(os.getpid(), signal.SIGSEGV)


def exit_with_3():
    os._exit(3)


def leave():
    raise SystemExit


def items(batches):
    return [[int(item.flatten()[0]) for item in batch] for batch in batches]


def all_items(dataset, *args, **options):
    """Load an epoch in a frame that ends, so that nothing keeps the loader."""
    return items(phalanx.DataLoader(dataset, *args, **options))


def error_of_epoch(dataset, *args, **options):
    """Return class and message of the error that ends an epoch; the error itself would keep the loader's workers."""
    try:
        all_items(dataset, *args, **options)
    except (LookupError, RuntimeError) as error:
        told = type(error), str(error)
    else:
        pytest.fail("the epoch ended without an error")
    gc.collect()  # a frame of torch that raises an error of the dataset keeps the error, and so the workers
    return told


def batches_of(length, batch_size):
    return [list(range(at, min(at + batch_size, length))) for at in range(0, length, batch_size)]


def worker_pids():
    return sorted(child.pid for child in multiprocessing.active_children())


def wait_for_death(pid):
    """Wait until a child is dead; its parent has yet to be told."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


# ---- the error


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (kill, r"is killed by signal: Killed\. It was worker 1 .* Probably memory ran out"),
        (segfault, r"is killed by signal: Segmentation fault\. It was worker 1 .* Native code crashed"),
        (exit_with_3, r"exited unexpectedly with exit code 3\. It was worker 1 .* num_workers=0 shows"),
        (leave, r"exited unexpectedly with exit code 0\. It was worker 1 .* has ended the process"),
    ],
)
def test_a_death_names_signal_worker_and_samples(tmp_path, end, words):
    begun_s = time.monotonic()
    kind, message = error_of_epoch(Fatal(tmp_path, {6: 1}, end), 4, num_workers=2)
    assert time.monotonic() - begun_s < 4  # torch looks every five seconds
    assert kind is RuntimeError
    assert re.match(r"DataLoader worker \(pid \d+\) " + words, message)
    assert ", at sample 6 in the batch of samples 4, 5, 6 and 7. " in message


def crash():
    ctypes.string_at(0)


def test_a_crash_names_the_line(tmp_path):
    dataset = Fatal(tmp_path, {6: 1}, crash)
    _, message = error_of_epoch(dataset, 4, num_workers=1)
    line = crash.__code__.co_firstlineno + 1
    assert f"in the batch of samples 4, 5, 6 and 7. It crashed at {__file__}:{line}. Native code crashed" in message


def exit_when_collated(samples):
    kill()


@pytest.mark.parametrize(
    ("dataset", "options", "at"),
    [
        (FatalWithPages, {"batch_size": 4}, "in the batch of samples 4, 5, 6 and 7"),
        (Fatal, {"batch_size": None}, "at sample 6"),
        (Fatal, {"batch_sampler": [(0, 1, 2, 3), (4, 5, 6, 7)]}, "in the batch of samples 4, 5, 6 and 7"),
        (Fatal, {"batch_size": 4, "num_workers": 1, "collate_fn": exit_when_collated},
         "which had loaded the batch of samples 0, 1, 2 and 3"),
        (Fatal, {"batch_size": 4, "num_workers": 1, "worker_init_fn": lambda worker: kill()},
         "before it began the batch of samples 0, 1, 2 and 3"),
    ],
)  # fmt: skip
def test_a_death_says_as_much_as_is_known(tmp_path, dataset, options, at):
    words = KILLED.format(pid=r"\d+", worker=r"\d", at=at)
    _, message = error_of_epoch(dataset(tmp_path, {6: 1}), **{"num_workers": 2} | options)
    assert re.match(words, message)


class FatalStream(Stream):
    def __iter__(self):
        yield from range(3)
        kill()


def test_a_death_at_a_stream_names_no_samples():
    with pytest.raises(RuntimeError, match=r"Killed\. It was worker 0 of rank 0\. Probably"):
        list(phalanx.DataLoader(FatalStream(), 2, num_workers=1))


class Uneven(torch.utils.data.IterableDataset):
    """Worker 0 has one item, worker 1 has ten."""

    def __iter__(self):
        return iter(range((1, 10)[torch.utils.data.get_worker_info().id]))


def test_a_worker_that_has_finished_and_ends_slowly_disturbs_nobody():
    gate = os.pipe()

    def begin(worker):
        os.close(gate[1])
        threading.Thread(target=os.read, args=(gate[0], 1)).start()  # its process ends when the test closes the pipe

    loader = phalanx.DataLoader(Uneven(), batch_size=None, num_workers=2, prefetch_factor=1, worker_init_fn=begin)
    batches = iter(loader)
    seen = [next(batches) for _ in range(10)]
    os.close(gate[1])
    assert sorted([*seen, *batches]) == [0, *range(10)]
    os.close(gate[0])


def test_a_stream_cannot_be_retried():
    with pytest.raises(ValueError, match="worker_retries=1: the dataset is a stream, here a Stream, and a worker"):
        phalanx.DataLoader(Stream(), num_workers=1, worker_retries=1)
    with pytest.raises(ValueError, match="worker_retries must be at least 0, got -1"):
        phalanx.DataLoader(range(3), worker_retries=-1)


def test_a_death_never_interrupts_a_step(tmp_path):
    batches = iter(phalanx.DataLoader(Fatal(tmp_path, {}), 1, num_workers=1))
    next(batches)
    (pid,) = worker_pids()
    os.kill(pid, signal.SIGKILL)
    wait_for_death(pid)
    for _ in range(100):
        time.monotonic()  # torch's handler of SIGCHLD would raise the error here
    with pytest.raises(RuntimeError, match=rf"DataLoader worker \(pid {pid}\) is killed by signal: Killed"):
        list(batches)


def test_a_thread_is_told_as_fast(tmp_path):
    told = []

    def load():
        told.append(error_of_epoch(Fatal(tmp_path, {6: 1}), 4, num_workers=2)[1])

    begun_s = time.monotonic()
    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    assert "at sample 6" in told[0]
    assert time.monotonic() - begun_s < 4


def results_of(batches):
    """Return the first item of each batch, or the error in its place."""
    found = []
    while True:
        try:
            found.append(int(next(batches)[0][0]))
        except RuntimeError as error:
            found.append(str(error).partition(" (pid")[0])
        except StopIteration:
            return found


@pytest.mark.parametrize("persistent_workers", [False, True])
@pytest.mark.parametrize("reads_elsewhere", [False, True])
def test_the_error_comes_in_the_turn_of_each_lost_batch(tmp_path, reads_elsewhere, persistent_workers):
    options = {"num_workers": 2, "persistent_workers": persistent_workers}
    loader = phalanx.DataLoader(Fatal(tmp_path, {6: 1}), 4, **options)
    batches = iter(loader)
    with ThreadPoolExecutor(1) as thread:  # as the thread that pins memory
        found = thread.submit(results_of, batches).result(30) if reads_elsewhere else results_of(batches)
    assert found == [0, "DataLoader worker", 8, "DataLoader worker", 16, "DataLoader worker"]
    del batches
    assert items(loader) == batches_of(24, 4)
    gc.collect()


class Raising(Fatal):
    def __getitem__(self, index):
        if index == 6:
            raise LookupError("no such file")
        return super().__getitem__(index)


def unable(samples):
    raise LookupError("no such file")


def unable_to_begin(worker):
    raise LookupError("no such file")


@pytest.mark.parametrize(
    ("options", "at"),
    [
        ({"batch_size": 4}, ", at sample 6"),
        ({"batch_size": None}, ", at sample 6"),
        ({"batch_size": 4, "collate_fn": unable}, ", in the batch of samples 0, 1, 2 and 3"),
        ({"batch_size": 4, "worker_init_fn": unable_to_begin}, ""),
    ],
)
def test_an_exception_of_the_dataset_names_the_sample(tmp_path, options, at):
    kind, message = error_of_epoch(Raising(tmp_path, {}), num_workers=1, worker_retries=1, **options)
    assert kind is LookupError
    assert message.startswith(f"Caught LookupError in DataLoader worker process 0{at}.\nOriginal Traceback ")
    assert "in __getitem__" in message or "in unable" in message


# ---- retries


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefetch_factor": 1},
        {"in_order": False},
        {"timeout": 60},
        {"persistent_workers": True},
        {"worker_init_fn": lambda worker: torch.manual_seed(worker)},
        {"generator": torch.Generator()},
        {"width": 100_000},
        {"dataset": FatalWithPages},
        pytest.param({"multiprocessing_context": "forkserver"}, marks=pytest.mark.slow),
        pytest.param({"multiprocessing_context": "spawn", "worker_init_fn": None}, marks=pytest.mark.slow),
    ],
)
def test_each_batch_comes_once_in_spite_of_deaths(tmp_path, capfd, options):
    options = dict(options)
    dataset = options.pop("dataset", Fatal)(tmp_path, {0: 1, 6: 2, 23: 1}, width=options.pop("width", 10))
    loader = phalanx.DataLoader(dataset, 4, num_workers=2, worker_retries=4, **options)
    for _ in range(2):
        loaded = items(loader)
        assert (loaded if options.get("in_order", True) else sorted(loaded)) == batches_of(24, 4)
    told = re.findall(r"DataLoader worker \d \(pid \d+\) was killed by SIGKILL, (.*) the batch", capfd.readouterr().err)
    assert len(told) == 4
    assert loader.worker_retries == 4


def test_samples_that_are_not_batched_come_once(tmp_path):
    loader = phalanx.DataLoader(Fatal(tmp_path, {0: 1, 6: 2}), None, num_workers=2, worker_retries=3)
    assert [int(item[0]) for item in loader] == list(range(24))


def test_a_line_says_who_died_and_how_many_retries_are_left(tmp_path, capfd):
    all_items(Fatal(tmp_path, {6: 1}), 4, num_workers=2, worker_retries=2)
    assert re.fullmatch(
        r"phalanx: rank 0: DataLoader worker 1 \(pid \d+\) was killed by SIGKILL, at sample 6 in the batch of samples "
        r"4, 5, 6 and 7; a new worker does its work again\. Retries left in this epoch: 1\n",
        capfd.readouterr().err,
    )


def test_a_batch_that_kills_again_and_again_is_an_error(tmp_path):
    words = r"at sample 6 in the batch of .*\. worker_retries=2 is used up\. This batch was tried 3 times\. Probably"
    assert re.search(words, error_of_epoch(Fatal(tmp_path, {6: 9}), 4, num_workers=2, worker_retries=2)[1])


def test_retries_are_counted_in_each_epoch(tmp_path):
    dataset = Fatal(tmp_path, {6: 3})
    loader = phalanx.DataLoader(dataset, 4, num_workers=1, worker_retries=2, persistent_workers=True)
    with pytest.raises(RuntimeError, match="is used up"):
        items(loader)
    assert items(loader) == items(loader) == batches_of(24, 4)


def test_persistent_workers_may_die_between_epochs(tmp_path, capfd):
    loader = phalanx.DataLoader(Fatal(tmp_path, {}), 4, num_workers=2, worker_retries=1, persistent_workers=True)
    for _ in range(3):
        assert items(loader) == batches_of(24, 4)
        pid = worker_pids()[0]
        os.kill(pid, signal.SIGKILL)
        wait_for_death(pid)
    assert capfd.readouterr().err.count("Retries left in this epoch: 0") == 2


def test_an_epoch_after_one_that_was_left_begins_anew(tmp_path):
    loader = phalanx.DataLoader(Fatal(tmp_path, {}), 4, num_workers=2, worker_retries=1, persistent_workers=True)
    next(iter(loader))
    os.kill(worker_pids()[0], signal.SIGKILL)
    assert items(loader) == batches_of(24, 4)


class Texts(Dataset):
    """Items that do not fit into a pipe; item 1 is there once the test opens a gate.

    Args:
        forks: Whether each worker leaves a process behind that has the worker's ends of its pipes.
    """

    def __init__(self, forks=False):
        self._forks = forks
        self.gate, self.end = os.pipe(), os.pipe()

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index < 2 and self._forks and os.fork() == 0:
            os.close(self.end[1])
            os.read(self.end[0], 1)
            os._exit(0)
        if index == 1:
            os.read(self.gate[0], 1)
        return f"{index:08}" * (1 << 17)

    def close(self):
        for fd in (*self.gate, *self.end):
            os.close(fd)


@pytest.mark.parametrize("forks", [False, True])
def test_a_message_that_is_cut_off_is_sent_again(forks):
    data = Texts(forks)
    options = {"num_workers": 2, "worker_retries": 1, "prefetch_factor": 1, "collate_fn": list, "timeout": 60}
    batches = iter(phalanx.DataLoader(data, 1, **options))
    seen = [next(batches)[0][:8]]
    worker = batches._batches._workers[1]
    os.write(data.gate[1], b"12")  # for this worker, and for the one that takes its place
    assert worker.line.results.reader.poll(60)  # it has begun to send a message, which is too long for the pipe
    os.kill(worker.pid, signal.SIGKILL)
    wait_for_death(worker.pid)
    seen += [batch[0][:8] for batch in batches]
    assert seen == [f"{index:08}" for index in range(12)]
    data.close()


def test_a_batch_that_was_on_its_way_is_lost_with_its_worker():
    data = Texts()
    os.write(data.gate[1], b"1")
    batches = iter(phalanx.DataLoader(data, 1, num_workers=1, prefetch_factor=2, collate_fn=list))
    worker = batches._batches._workers[0]
    assert worker.line.results.reader.poll(60)
    while worker.line.progress.task < 1:
        time.sleep(0.01)  # until it has begun the next batch
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"is killed by signal: Killed\. It was worker 0"):
        next(batches)
    del batches
    gc.collect()
    data.close()


def test_a_killed_epoch_resumes_in_the_middle(tmp_path):
    dataset = Fatal(tmp_path, {6: 1, 18: 1})
    loader = phalanx.DataLoader(dataset, 4, num_workers=2, worker_retries=2, shuffle=False)
    batches = iter(loader)
    seen = items(next(batches) for _ in range(3))
    resumed = phalanx.DataLoader(dataset, 4, num_workers=2, worker_retries=1, shuffle=False)
    resumed.load_state_dict(loader.state_dict())
    assert seen + items(resumed) == batches_of(24, 4)


class Drawing(Fatal):
    def __getitem__(self, index):
        super().__getitem__(index)
        return index, int(torch.initial_seed())


def test_a_new_worker_has_the_seed_of_the_dead_one(tmp_path):
    def seeds(deaths):
        options = {"num_workers": 1, "worker_retries": 1, "generator": torch.Generator().manual_seed(3)}
        return [seed.tolist() for _, seed in phalanx.DataLoader(Drawing(tmp_path, deaths), 4, **options)]

    assert seeds({6: 1}) == seeds({})


@settings(max_examples=NUM_EXAMPLES, deadline=None)
@given(
    st.integers(1, 30), st.integers(1, 5), st.integers(1, 2), st.integers(1, 3), st.booleans(),
    st.dictionaries(st.integers(0, 29), st.integers(1, 2), max_size=3),
)  # fmt: skip
def test_every_batch_comes_once_whatever_dies(
    tmp_path_factory, length, batch_size, num_workers, prefetch_factor, in_order, deaths
):
    dataset = Fatal(tmp_path_factory.mktemp("deaths"), deaths, length=length)
    options = {"num_workers": num_workers, "prefetch_factor": prefetch_factor, "in_order": in_order}
    loaded = all_items(dataset, batch_size, worker_retries=sum(deaths.values()), **options)
    assert (loaded if in_order else sorted(loaded)) == batches_of(length, batch_size)


def load_and_kill(num_kills):
    """Kill a worker after each batch, wherever it is; return what was loaded, which is all items."""
    loader = phalanx.DataLoader(range(4 * num_kills), 4, num_workers=2, worker_retries=num_kills)
    loaded = []
    for number, batch in enumerate(loader):
        loaded.append(batch.tolist())
        with contextlib.suppress(IndexError, ProcessLookupError):
            os.kill(worker_pids()[number % 2], signal.SIGKILL)
    return loaded


@pytest.mark.slow
def test_two_hundred_kills_lose_nothing():
    fds = len(os.listdir("/proc/self/fd"))
    assert load_and_kill(200) == batches_of(800, 4)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= fds
    assert "memfd:phalanx-loader" not in Path("/proc/self/maps").read_text()


def test_a_few_kills_lose_nothing():
    assert load_and_kill(10) == batches_of(40, 4)


class Faulty(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        if index == 3:
            raise ValueError("a bad sample")
        return {"index": copy.deepcopy(index)}


def batches_and_errors(batches):
    found = []
    while (batch := next_or_error(batches)) is not None:
        found.append(batch)
    return found


def next_or_error(batches):
    try:
        batch = next(batches, None)
        return batch if batch is None else batch["index"].tolist()
    except ValueError:
        return "error"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_after_an_error_the_epoch_goes_on(num_workers):
    options = {"batch_size": 2, "num_workers": num_workers}
    ours, plain = (batches_and_errors(iter(cls(Faulty(), **options))) for cls in (phalanx.DataLoader, DataLoader))
    assert ours == plain == [[0, 1], "error", [4, 5], [6, 7], [8, 9]]
    gc.collect()


class Whole(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return type(index) is list, copy.deepcopy(index), index


def test_a_dataset_that_takes_whole_batches_may_keep_the_indices():
    data = Whole()
    sampler = BatchSampler(SequentialSampler(data), 4, False)
    found = list(phalanx.DataLoader(data, sampler=sampler, batch_size=None, num_workers=1))
    assert [(copied, index) for _, copied, index in found] == [([*part], [*part]) for part in sampler]
    assert all(is_list and type(copied) is type(index) is list for is_list, copied, index in found)


def test_persistent_workers_have_one_iterator():
    loader = phalanx.DataLoader(Whole(), num_workers=1, persistent_workers=True)
    assert iter(loader) is iter(loader)


def test_a_stream_of_persistent_workers_begins_anew_beside_an_iterator_that_is_over():
    loader = phalanx.DataLoader(Stream(), 2, num_workers=1, persistent_workers=True)
    over = iter(loader)
    assert [*over]
    assert [*iter(loader)]
    with pytest.raises(TypeError):
        len(over)


def test_a_forked_process_that_drops_the_iterator_leaves_the_workers_alone(tmp_path):
    batches = iter(phalanx.DataLoader(Fatal(tmp_path, {}), 4, num_workers=2))
    seen = [next(batches)]
    if (child := os.fork()) == 0:
        try:
            batches._batches._shutdown_workers()
            for worker in batches._batches._workers:
                worker.terminate()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert items([*seen, *batches]) == batches_of(24, 4)


def test_threads_may_iterate_one_loader():
    loader = phalanx.DataLoader(torch.utils.data.TensorDataset(torch.arange(10)), batch_size=5, num_workers=1)
    kinds = type(loader.multiprocessing_context), loader.collate_fn
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda _: [batch.tolist() for (batch,) in loader], range(6)))
    assert found == [[[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]] * 6
    assert (type(loader.multiprocessing_context), loader.collate_fn) == kinds
