"""Advice on the usual mistakes: one table of messages of torch, Python and the system."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
from collections.abc import Iterator, Sequence

from phalanx._errors import address, addressed
from phalanx.failure.ending import Ending

_BY_SIGNAL = {
    signal.SIGILL: "an instruction that this processor lacks: a library was built for a newer one",
    signal.SIGSEGV: "native code crashed, called from the Python line above",
    signal.SIGBUS: "a mapped file or shared memory ran out: look at the disk and at /dev/shm",
    signal.SIGABRT: "native code gave up; its reason is in the log",
    signal.SIGFPE: "native code divided by zero",
    signal.SIGXCPU: "the limit of CPU time was reached (ulimit -t)",
}
_OUT_OF_MEMORY = (
    "the kernel has just killed a process because memory ran out: smaller batch, fewer ranks, or fewer DataLoader "
    "workers"
)
_KILLED = "it was killed from outside: by a person, a job's limit, or a container's memory limit"
_ADVISED = re.compile("it made fewer calls: |another rank ran out of data earlier: ")  # errors that contain advice
_OF_A_CHILD = re.compile(r"^\S*ProcessExitedException: .* with exit code 1$|worker \(pid.*exited unexpectedly", re.M)
_NO_GUARD = r"before the\s+current process has finished its bootstrapping phase"
_LOG_BYTES = 2**16
_SHELLS_SIGKILL = 128 + signal.SIGKILL
_EXPLAINED_SIGNALS = {
    signal.SIGABRT: "exit-134",
    signal.SIGBUS: "bus-error",
    signal.SIGKILL: "exit-137",
    signal.SIGSEGV: "exit-139",
    signal.SIGPIPE: "exit-141",
    signal.SIGTERM: "exit-143",
    signal.SIGINT: "exit-130",
}


@dataclasses.dataclass(frozen=True)
class Hint:
    """Advice for one mistake.

    Attributes:
        kind: Pattern of the exception's class, without its module.
        text: Pattern to find in the traceback and its message.
        advice: Advice, in which {python} stands for the interpreter's path.
        seen: Release in which the message was seen with these words.
        entry: Name of the explanation; empty if there is none.
    """

    kind: str
    text: str
    advice: str
    seen: str
    entry: str = ""


_HINTS = (
    # ---- missing GPUs
    Hint(
        "ValueError", r"device_ids and output_device arguments only work with",
        "on a CPU leave device_ids and output_device out: DistributedDataParallel(model)", "torch 2.15",
    ),
    Hint(
        "ValueError", r"SyncBatchNorm (?:layers only work with GPU modules|expected input tensor to be on)",
        "torch's SyncBatchNorm needs GPUs; phalanx.convert_sync_batchnorm(model) works on a CPU, too", "torch 2.15",
    ),
    Hint(
        r"\w+", r"nccl2? requires at least one CUDA device|only supported with GPUs|doesn't have NCCL built in",
        'NCCL needs GPUs, and torch finds none here; on a CPU: init_process_group("phalanx")', "torch 2.15", "no-gpu",
    ),
    Hint(
        r"\w+", r"doesn't have MPI built in|MPI backend is not available",
        'this torch has no MPI; init_process_group("phalanx") works under mpirun too', "torch 2.15",
    ),
    Hint(
        r"\w+", r"invalid device ordinal",
        "there are more ranks than GPUs: --nproc-per-node gpu starts one rank per GPU",
        "torch 2.15", "more-ranks-than-gpus",
    ),
    Hint(
        r"\w+", r"Duplicate GPU detected",
        "two ranks use one GPU: --nproc-per-node gpu starts one rank per GPU, and phalanx.init() gives each its own",
        "torch 2.11", "nccl-error",
    ),
    Hint(
        r"\w+", r"not compiled with CUDA|No CUDA GPUs|Found no NVIDIA driver",
        "torch finds no GPU here: leave cuda() and set_device() out, or use phalanx.init().device, "
        "which is the CPU where there is no GPU",
        "torch 2.15", "no-gpu",
    ),
    # ---- ranks and groups
    Hint(
        "ValueError", r"world size cannot be 0",
        "leave rank and world_size out: init_process_group() takes them from phalanx run", "torch 2.15", "world-size",
    ),
    Hint(
        r"\w+", r"timed out after -\d+ ?ms",
        "the timeout of init_process_group must be more than 0 s", "torch 2.15",
    ),
    Hint(
        "(Assertion|Value)Error", r"Unknown (?:c10d )?backend type",
        'torch knows no backend of that name: init_process_group("phalanx"), or "gloo", "nccl", "mpi"',
        "torch 2.15", "unknown-backend",
    ),
    Hint(
        r"\w+", r"Default process group has not been initialized",
        "call phalanx.init() or torch.distributed.init_process_group() first", "torch 2.15", "no-process-group",
    ),
    Hint(
        r"\w+", _NO_GUARD,
        'guard the call that starts processes: if __name__ == "__main__": main()', "Python 3.11", "spawn",
    ),
    Hint(
        r"\w+", r"EADDRINUSE|[Aa]ddress already in use",
        "the port is taken: use another --master-port, or leave it out to have a free one chosen",
        "torch 2.15", "port-in-use",
    ),
    Hint(
        r"(EnforceNotMet|\w*Error)", r"op\.preamble\.length <= op\.nbytes",
        'the ranks gave Gloo tensors of different sizes; init_process_group("phalanx") names them',
        "torch 2.15", "gloo-sizes",
    ),
    # ---- models and data
    Hint(
        "RuntimeError", r'(?:Missing|Unexpected) key\(s\) in state_dict:\s+"module\.',
        "one of the two is wrapped: save model.module.state_dict(), and load into model.module",
        "torch 2.15", "module-prefix",
    ),
    Hint(
        r"\w+", r"DataLoader worker \(pid[^)]*\).*killed by signal: Killed",
        "memory ran out: fewer DataLoader workers, or a smaller batch",
        "torch 2.15", "dataloader-worker",
    ),
    Hint(
        r"\w+", r"DataLoader worker \(pid[^)]*\).*killed by signal: Bus error",
        "a mapped file or its disk, or /dev/shm with torch's own DataLoader (phalanx.DataLoader does not need it)",
        "torch 2.15", "dataloader-worker",
    ),
    Hint(
        r"(AttributeError|PicklingError|TypeError)", r"torch/utils/data/[^$]*(?:[Cc]an't|cannot) (?:pickle|get local)",
        "spawned DataLoader workers pickle the data set: no lambdas, open files or local functions in it; "
        "or leave multiprocessing_context out",
        "torch 2.15", "unpicklable",
    ),
    Hint(
        "BdbQuit", "BdbQuit",
        "in a job, call phalanx.breakpoint() on every rank instead: one of them gets the terminal, and the others wait",
        "Python 3.11",
    ),
    # ---- the host
    Hint(r"(CUDA)?OutOfMemoryError|\w+", r"CUDA out of memory|OutOfMemoryError",
         "the GPU is full: smaller batch, or see which process holds it: nvidia-smi",
         "torch 2.15", "cuda-out-of-memory"),
    Hint(
        r"\w+", r"^MemoryError|can't allocate memory|Cannot allocate memory",
        "no memory left: smaller batch, or fewer ranks", "torch 2.15", "out-of-memory",
    ),
    Hint(r"\w+", r"No space left on device", "the disk or /dev/shm is full", "Linux", "disk-full"),
    Hint(
        r"(|SystemExit)", r"unrecognized arguments: --local[-_]rank",
        "the script does not accept --local-rank: leave out --no-use-env", "Python 3.11", "usage",
    ),
    Hint(
        "ImportError", r"^ImportError(?!.*pip install)",
        "the package is installed but incomplete: import it alone with {python} -c 'import ...'", "Python 3.11",
    ),
)  # fmt: skip


def hint_for(end: Ending, ends: Sequence[Ending] = (), *, num_oom_kills: int = 0, command: Sequence[str] = ()) -> str:
    """Return advice about a failure, in one line; "" if there is none.

    Args:
        end: End of the rank that was the cause.
        ends: Ends of all ranks.
        num_oom_kills: Number of processes that the OOM killer has killed since the job began.
        command: Command of a rank: the interpreter and its script, or any program.
    """
    code = end.exitcode or 0
    if code in (-signal.SIGKILL, _SHELLS_SIGKILL):
        return _OUT_OF_MEMORY if num_oom_kills else _KILLED
    if -code in _BY_SIGNAL and not end.raised:
        return _BY_SIGNAL[signal.Signals(-code)]
    kind = end.last_words.name
    text = _said(end)
    if end.is_victim and (finished := [other.rank for other in ends if other.exitcode == 0]):
        if _ADVISED.search(text):
            return ""
        return (
            f"rank {finished[0]} had finished while this one went on: look for a call under a condition that only some "
            "ranks meet (if rank == 0), or give every rank equally many batches (drop_last=True; or model.join())"
        )
    if kind == "EOFError" and "EOF when reading a line" in text and any(other.rank < end.rank for other in ends):
        return "only the first rank has the terminal: call input() there, and broadcast_object_list the answer"
    if found := re.search(r"^ModuleNotFoundError: No module named '([\w.]+)'", text, re.MULTILINE):
        return _hint_for_module(found[1], list(command))
    for hint in _hints_that_fit(end):
        return hint.advice.replace("{python}", command[0] if command else "python")
    return _BY_SIGNAL.get(signal.Signals(-code), "") if -code in _BY_SIGNAL else ""


def explanation_for(end: Ending) -> str:
    """Return a reference such as ``(phalanx explain NAME)`` for an end; "" if there is none or its message has one."""
    entry = _entry_for(end)
    return address(entry) if entry else ""


def _entry_for(end: Ending) -> str:
    code = end.exitcode or 0
    if addressed(_said(end)):
        return ""
    if code in (-signal.SIGKILL, _SHELLS_SIGKILL):
        return "exit-137"
    for hint in _hints_that_fit(end):
        if hint.entry:
            return hint.entry
    number = -code if code < 0 else code - 128
    if number in _EXPLAINED_SIGNALS and not (code > 0 and end.raised):
        return _EXPLAINED_SIGNALS[signal.Signals(number)]
    return "rank-killed" if code < 0 else ""


def _said(end: Ending) -> str:
    lines = [*end.last_words.lines, end.last_words.summary]
    if end.folder and _OF_A_CHILD.search("\n".join(lines)):  # a child process's error; only the log has all of it
        with contextlib.suppress(OSError), open(end.log, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _LOG_BYTES))
            lines += re.findall(_NO_GUARD, log.read().decode(errors="replace"))[:1]
    return "\n".join(lines)


def _hints_that_fit(end: Ending) -> Iterator[Hint]:
    for hint in _HINTS:
        if re.fullmatch(hint.kind, end.last_words.name) and re.search(hint.text, _said(end), re.MULTILINE):
            yield hint


def _hint_for_module(name: str, command: list[str]) -> str:
    """Return the advice for a module that was not found; the module may lie in a folder that is not on the path."""
    python = command[0] if command else "python"
    top, _, rest = name.partition(".")
    script = command[1] if len(command) > 1 and not command[1].startswith("-") else ""
    folder = os.path.dirname(os.path.abspath(script))
    for place in dict.fromkeys((folder, os.getcwd(), os.path.dirname(folder))):
        if not (os.path.isdir(os.path.join(place, top)) or os.path.isfile(os.path.join(place, f"{top}.py"))):
            continue
        if place == folder and script:
            return f"{os.path.join(place, top)} has no module {rest!r}" if rest else ""
        return f"{top!r} is in {place}, which is not on Python's path: PYTHONPATH={place} phalanx run ..."
    return f"install it where the ranks run: {python} -m pip install {top}"
