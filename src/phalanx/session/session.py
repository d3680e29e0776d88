"""`phalanx.init`: finds this process's place in the job and its device, and creates the process group.

A process has at most one session, `_current`. `init` finds the place (see `meeting_point`), waits until the ranks have
met, chooses backend and device, and makes the default group; if the script has already made that group, `init` adopts
it. `shutdown`, the end of the outermost ``with`` block, or the script's own `destroy_process_group` ends the session; a
group that the script made is not destroyed. A Trainer that outlives another rank's failure calls `init_again`: the
existing `Session` object then describes the new place. The methods for hand-written loops only call functions of
`loop`.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import importlib
import sys
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phalanx import _env, _torch
from phalanx._errors import PhalanxError, require_linux
from phalanx.failure.last_words import tell_when_ended
from phalanx.host.schedulers import Placement
from phalanx.launch.rank import watch_torch
from phalanx.record import writer
from phalanx.rendezvous.reimported import refuse_to_meet_again
from phalanx.session.arguments import naming_arguments
from phalanx.session.loop import DTYPES, checked_precision, gather_rows, going_first, synchronizing
from phalanx.session.meeting_point import contract, find_place, meet, place_by_hosts
from phalanx.wire.sockets import keep_paths_short


@dataclasses.dataclass(frozen=True)
class Session:
    """This process's place in the job. The session ends with `shutdown`, or at the end of a ``with`` block.

    Attributes:
        rank: Rank of this process in the job.
        world_size: Number of ranks in the job.
        local_rank: Rank of this process on its host.
        local_world_size: Number of ranks on this host.
        node_rank: Number of this host in the job.
        num_nodes: Number of hosts in the job.
        device: Device for this rank's model.
        backend: Backend of the process group, in the form that ``init_process_group`` accepts.
        reason: Reason why CPU tensors do not use phalanx; empty if they do, or if the caller chose the backend.
        scheduler: Name of the launcher or scheduler that assigned the rank.

    Example:
        >>> session.rank, session.world_size, session.device
        (0, 1, device(type='cpu'))
        >>> session.print("once, on rank 0")
        once, on rank 0
        >>> with session.main_process_first():
        ...     inputs = torch.ones(10, 1)
        >>> session.barrier()
        >>> session.gather(inputs, total=10).shape
        torch.Size([10, 1])
        >>> ddp = phalanx.DistributedDataParallel(nn.Linear(1, 1))
        >>> scaler = session.grad_scaler("bf16")
        >>> with session.accumulate(ddp, step=0, every=2) as is_last:
        ...     with session.autocast("bf16"):
        ...         loss = ddp(inputs).mean() / 2
        ...     scaler.scale(loss).backward()
        >>> is_last
        False
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    device: torch.device
    backend: str
    reason: str
    scheduler: str

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0 of the job."""
        return self.rank == 0

    def print(self, *values: object, **options: Any) -> None:
        """Print on rank 0 only. Arguments are those of the built-in ``print``."""
        if self.is_main:
            builtins.print(*values, **options)

    def barrier(self) -> None:
        """Wait until every rank has called this, for at most the group's timeout."""
        dist.barrier()

    def main_process_first(self, *, per_host: bool = False) -> contextlib.AbstractContextManager[None]:
        """Return a context whose block, such as a download, runs on rank 0 first and then on the other ranks.

        The other ranks wait for at most the group's timeout. If the block raises an exception on rank 0, it does not
        run on the other ranks: they raise a `PhalanxError` that names the exception.

        Args:
            per_host: Whether the block runs first on one rank of each host, for hosts that share no file system.
        """
        return going_first(self.rank, self.local_rank == 0 if per_host else self.is_main)

    def gather(self, value: Any, total: int | None = None) -> Any:
        """Return the rows of all ranks' tensors, concatenated, on every rank.

        Ranks may have different numbers of rows.

        Args:
            value: Tensor, or mappings, lists and tuples of tensors, which are gathered position by position: a list of
                batches becomes a list in which each batch has the rows of all ranks. To get one tensor instead, join
                the batches first with ``torch.cat(batches)``. A tensor without a dimension counts as one row; a value
                that is not a tensor becomes a list with one entry for each rank.
            total: Number of samples in the dataset. The rows are then returned in the dataset's order, without padding,
                provided that our `DistributedSampler` or torch's has dealt out the samples without shuffling. By
                default, the rows are in rank order.

        Raises:
            ValueError: The ranks' values differ in structure, dtype or shape, or have too few rows, or a list holds
                only numbers, which may be samples or separate values: pass samples as a tensor, separate values as a
                tuple. Every rank raises this error.
        """
        return gather_rows(value, total)

    @contextlib.contextmanager
    def accumulate(self, model: Any, step: int, every: int, num_steps: int | None = None) -> Iterator[bool]:
        """Accumulate gradients over `every` passes, and average them over the ranks only in the last pass.

        Run the forward and backward computation of one pass inside the context, with the loss divided by `every`. The
        ``with`` statement yields whether the optimizer should step after this pass.

        Args:
            model: Model wrapped in our or torch's DistributedDataParallel, or sharded by FSDP2; for any other model,
                passes are only counted.
            step: Number of the pass in the epoch, from 0.
            every: Number of passes for each optimizer step.
            num_steps: Number of passes in the epoch; None if unknown. The optimizer always steps after the last pass.

        Raises:
            ValueError: `every` is less than 1.
        """
        if every < 1:
            raise ValueError(f"accumulate: every must be at least 1, got {every}")
        averages = (step + 1) % every == 0 or step + 1 == num_steps
        with synchronizing(model, averages):
            yield averages

    def autocast(self, precision: str) -> contextlib.AbstractContextManager[Any]:
        """Return ``torch.autocast`` for this device; for "fp32", return a context that does nothing.

        Args:
            precision: "fp32", "bf16" or "fp16".

        Raises:
            ValueError: `precision` has another value.
        """
        dtype = DTYPES[checked_precision("autocast", precision)]
        return contextlib.nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def grad_scaler(self, precision: str) -> torch.amp.GradScaler:
        """Return torch's ``GradScaler`` for this device; it scales only if `precision` is "fp16".

        Raises:
            ValueError: `precision` is not one that `autocast` accepts.
        """
        return torch.amp.GradScaler(self.device.type, enabled=checked_precision("grad_scaler", precision) == "fp16")

    def __enter__(self) -> Session:
        if _current is not None and _current.session is self:
            _current.num_blocks += 1
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if _current is None or _current.session is not self:  # the block itself has called shutdown()
            return
        _current.num_blocks -= 1
        if _current.num_blocks == 0:  # this was the outermost block
            _end(error)


@dataclasses.dataclass
class Made:
    """A session and how it was made.

    Attributes:
        arguments: Arguments of `init`.
        exported: Names of the environment variables that `init` set for its group; None if the script made the group.
        use: Result of `use_of_group` when the session was made; a later change means that the script used the group.
        num_blocks: Number of open ``with`` blocks of the session.
    """

    session: Session
    arguments: tuple[Any, ...]
    exported: tuple[str, ...] | None
    use: tuple[int, bool] | None
    num_blocks: int = 0


_current: Made | None = None


def _unknown_argument(function: str, name: str, known: list[str]) -> TypeError:
    meant = {"local_rank": "device", "nprocs": "world_size", "num_ranks": "world_size"}.get(name)
    return _env.unknown_argument(f"phalanx.{function}", name, known, meant)


@naming_arguments(_unknown_argument)
def init(
    backend: str | None = None,
    *,
    device: str | torch.device | None = None,
    timeout: float | timedelta | None = None,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> Session:
    """Join the job to which this process belongs; return a `Session`. A process without a job is a world of one rank.

    The place in the job comes from the arguments, or from the launcher: ``phalanx run``, torchrun, ``srun``,
    ``mpirun``, Kubeflow, or variables set by hand. Variables that torchrun would set are set until `shutdown`, if they
    are missing. A second call with the same arguments returns the same session.

    Args:
        backend: Backend, in the form that ``init_process_group`` accepts; default: ``"phalanx"``, or with CUDA,
            ``"cpu:phalanx,cuda:nccl"``.
        device: Device for this rank; default: the GPU whose number is the local rank, or the CPU if there is no GPU. A
            GPU becomes the current CUDA device.
        timeout: Timeout for collectives, in seconds; default: the backend's.
        init_method: URL where the ranks meet, such as ``"file:///shared/file"``; default: the launcher's.
        rank: Rank of this process, together with `world_size`; default: the launcher's.
        world_size: Number of ranks, together with `rank`; default: the launcher's.

    Raises:
        ValueError: The environment or the arguments are contradictory, torch does not know the backend, or `timeout` is
            not positive.
        RuntimeError: This host has fewer GPUs than ranks, or a session with other arguments exists.

    Example:
        >>> with phalanx.init() as session:
        ...     tensor = torch.ones(3, device=session.device)
        ...     dist.all_reduce(tensor)
        ...     print(tensor)
        tensor([1., 1., 1.])
    """
    global _current
    refuse_to_meet_again("phalanx.init")
    tell_when_ended(writer.note)
    watch_torch()
    limit = None if timeout is None else timedelta(seconds=_env.seconds("timeout", timeout))
    arguments = (backend, device, timeout, init_method, rank, world_size)
    if _current is not None and not dist.is_initialized():
        _end(None)  # the script has destroyed the group itself
    if _current is not None:
        if arguments not in (_current.arguments, (None,) * len(arguments)):
            raise RuntimeError("phalanx.init was called before with other arguments: call phalanx.shutdown() first")
        return _current.session
    keep_paths_short()  # for the sockets of data loaders' workers
    session: Session
    exported: tuple[str, ...] | None = None
    if dist.is_initialized():
        session = _adopt_group(device)
    else:
        session, exported = _create_group(find_place(rank, world_size), backend, device, limit, init_method)
    _current = Made(session, arguments, exported, use_of_group())
    writer.begin(session.rank, session.world_size)
    if session.reason and session.is_main:
        print(f"phalanx.init: backend {session.backend}: {session.reason}", file=sys.stderr)
    return session


def made() -> Made | None:
    """Return the current session and how it was made; None if there is no session."""
    return _current


def use_of_group() -> tuple[int, bool] | None:
    """Return the default group's number of collectives and whether it has sent messages; None if it keeps no count."""
    group: Any = dist.group.WORLD
    return (group.num_collectives, group.has_messages) if hasattr(group, "num_collectives") else None


def why_not_met() -> str:
    """Return why a new process that calls `init` could not join the group of this process; empty if it could."""
    if not (dist.is_available() and dist.is_initialized()):
        return ""
    if _current is None or _current.exported is None or any(one is not None for one in _current.arguments[3:]):
        return "a process group was made before"
    if _current.use is None:
        return "a process group that does not count its collectives was made before"
    if _current.use != use_of_group():
        return "the script has used its process group before"
    if len(_torch.world.pg_names) > 1:
        return "more than one process group was made before"
    return ""


def init_again(ended: Made) -> Session:
    """Join the job again, as `init` did, after the group has failed and this process has been given a new place.

    The existing session, to which the script may refer, is updated to the new place and returned.
    """
    global _current
    backend, device, timeout = ended.arguments[:3]
    new = init(backend, device=device, timeout=timeout)
    assert _current is not None
    for name in (field.name for field in dataclasses.fields(Session)):
        object.__setattr__(ended.session, name, getattr(new, name))
    _current = dataclasses.replace(_current, session=ended.session, num_blocks=ended.num_blocks)
    return ended.session


def _adopt_group(device: str | torch.device | None) -> Session:
    """Return the session of a process group that the script created."""
    place = find_place(dist.get_rank(), dist.get_world_size())
    if not place.knows_hosts:
        # `life_store` comes first: the default store may still hold the values that an earlier group wrote.
        store = getattr(dist.group.WORLD, "life_store", None) or _torch.get_default_store()
        place = place_by_hosts(place, store)
    backend = str(dist.get_backend_config())
    return _session(place, _choose_device(device, backend, place), backend)


def _create_group(
    place: Placement,
    backend: str | None,
    device: str | torch.device | None,
    timeout: timedelta | None,
    init_method: str | None,
) -> tuple[Session, tuple[str, ...]]:
    """Create the process group; return its session and the names of the variables set for it."""
    chosen, reason = (_known(backend), "") if backend else _choose_backend()
    store = meet(place, init_method, timeout, chosen)
    place = place if place.knows_hosts else place_by_hosts(place, store)
    session = _session(place, _choose_device(device, chosen, place), chosen, reason)
    exported = _env.export(contract(place, store))
    try:
        dist.init_process_group(chosen, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)
    except BaseException:
        _env.withdraw(exported)
        raise
    return session, exported


def _session(place: Placement, device: torch.device, backend: str, reason: str = "") -> Session:
    names = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes", "scheduler")
    return Session(**{name: getattr(place, name) for name in names}, device=device, backend=backend, reason=reason)


def shutdown() -> None:
    """Leave the job: destroy the process group that `init` made, and unset the variables that it set.

    A process group that existed before `init` is not destroyed. Without a session, nothing happens.

    Example:
        >>> phalanx.shutdown()
        >>> dist.is_initialized()
        False
    """
    _end(None)


def _end(error: BaseException | None) -> None:
    """End the session, and report an error, if any, to the ranks that are waiting for this one."""
    global _current
    if _current is None:
        return
    ended, _current = _current, None
    if ended.exported is None:
        return
    _env.withdraw(ended.exported)
    if not dist.is_initialized():  # the script has destroyed the group
        return
    if error is None:
        dist.destroy_process_group()
    else:
        leave_failed_groups(error, ended.session.backend)


def leave_failed_groups(error: BaseException, backend: str) -> None:
    """Destroy all process groups although other ranks may have failed; report the error to ranks that are waiting."""
    if "phalanx" in backend:
        from phalanx.backend.groups import leave_groups

        leave_groups(error)
    if "nccl" in backend:
        _torch.abort_process_group()  # not destroy_process_group, which would wait for peers that may have failed
    else:
        dist.destroy_process_group()


def leave_session(error: BaseException) -> None:
    """End the session, if there is one, and destroy all process groups, including the script's own."""
    _end(error)
    if dist.is_available() and dist.is_initialized():
        leave_failed_groups(error, str(dist.get_backend_config()))


def _known(backend: str) -> str:
    """Return the backend that the script asked for, if torch knows it.

    Raises:
        ValueError: torch does not know the backend; the error suggests the right name, and lists all backends.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it does not know the devices of an unknown backend
        by_device = dist.BackendConfig(dist.Backend(backend)).get_device_backend_map()
    backends = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]
    for name in by_device.values():
        if name not in dist.Backend.backend_list:
            raise ValueError(
                f"phalanx.init: there is no backend {name!r}{_env.did_you_mean(name, backends) or '.'} It takes "
                f'{", ".join(sorted(backends))}, or one for each kind of device, such as "cpu:phalanx,cuda:nccl"'
            )
    return backend


def _choose_backend() -> tuple[str, str]:
    """Return the default backend, and the reason why CPU tensors do not use phalanx; the reason is empty if they do."""
    on_cpu, reason = "phalanx", ""
    try:
        require_linux()
        importlib.import_module("phalanx.backend.groups")
    except PhalanxError as error:
        on_cpu, reason = "gloo", str(error).partition(":")[0]
    except (ImportError, OSError) as error:
        on_cpu, reason = "gloo", f"phalanx can't be loaded here: {error}"
    if not torch.cuda.is_available():
        return on_cpu, reason
    return f"cpu:{on_cpu},cuda:{'nccl' if dist.is_nccl_available() else 'gloo'}", reason


def _choose_device(given: str | torch.device | None, backend: str, place: Placement) -> torch.device:
    if given is not None:
        device = torch.device(given)
    else:
        has_gpu = torch.cuda.is_available() and ("cuda" in backend or "nccl" in backend)
        device = torch.device("cuda" if has_gpu else "cpu")
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        count = torch.cuda.device_count()
        if place.local_rank >= count > 1:
            raise RuntimeError(
                f"rank {place.rank} is local rank {place.local_rank} and this host has {count} GPUs: start "
                f"--nproc-per-node {count}, or call phalanx.init(device='cpu')"
            )
        # A scheduler may show each rank only its own GPU.
        device = torch.device("cuda", 0 if count == 1 else place.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
