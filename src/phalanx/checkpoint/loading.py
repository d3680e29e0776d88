"""`load`: restores the newest undamaged checkpoint, from memory or from disk, on any number of ranks.

Rank 0 lists the candidates, newest first. The ranks share the hashing of all files, and only a checkpoint that every
rank has found undamaged is used. A hash shows that no file has changed by accident, but not who wrote it. So before a
checkpoint is accepted, the entries of its header must cover its data without gaps or overlaps, and each rank unpacks
its tree once on trial, with tensors that take no memory. Each tensor must appear in only one place of the tree, and its
blocks must cover the tensor exactly once (`state.blocks` checks that in linear time). If this trial raises anything,
the checkpoint counts as damaged: one warning names it, and the next candidate is tried. A checkpoint that does not fit
the user's state is an error.

Each rank then maps the files and copies the blocks that it needs into the existing tensors. So the shards of four ranks
can be loaded into the shards of three.

**Memory or disk.** A snapshot is loaded if it belongs to the same folder and is not older than the newest checkpoint on
disk. The hosts tell each other which images they hold. Of the snapshots whose images are all on some host, the newest
is loaded (see `memory.holdings` and `memory.fetching`). If a host lacks the memory for that, the checkpoint on disk is
loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any, Literal

from phalanx._errors import CheckpointError, printable, warn_caller
from phalanx._text import named
from phalanx.checkpoint.agreement import gather, raise_problems, require_all
from phalanx.checkpoint.disk import folder as folders
from phalanx.checkpoint.disk.folder import Checkpoint, Damaged
from phalanx.checkpoint.disk.pending import pending
from phalanx.checkpoint.disk.retention import find_best
from phalanx.checkpoint.memory.holdings import Holding, lost_of, newest_of
from phalanx.checkpoint.memory.snapshots import digest_of, memory
from phalanx.checkpoint.state.blocks import Reader
from phalanx.checkpoint.state.image import Image
from phalanx.checkpoint.state.restoring import (
    NOT_STRICT,
    NOT_STRICT_IN_TRAINER,
    drop_gradients,
    reason_of,
    restore,
    survey,
)
from phalanx.checkpoint.state.tree import refuse_no_mapping
from phalanx.checkpoint.state.unpacking import Json, unpack
from phalanx.record import writer
from phalanx.record.box import LOADED, LOADING
from phalanx.wire.rank_group import RankGroup


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The checkpoint that `load` has restored.

    Attributes:
        step: Step of the checkpoint.
        source: "memory" for a snapshot, "disk" for a saved checkpoint.

    Example:
        >>> state = {"weight": torch.ones(3)}
        >>> phalanx.checkpoint.save("runs/linear", state, step=1, wait=True)
        >>> phalanx.checkpoint.load("runs/linear", state)
        Loaded(step=1, source='disk')
    """

    step: int
    source: str


def load(
    folder: str | os.PathLike[str],
    state: MutableMapping[str, Any],
    step: int | str = "latest",
    *,
    strict: bool = True,
    missing: Literal["note", "ignore", "error"] = "note",
) -> Loaded | None:
    """Restore `state` from a checkpoint and return which one. Every rank calls it.

    Modules, optimizers, tensors and other objects with ``load_state_dict`` are restored in place, even inside dicts and
    lists; plain values, sets, deques and arrays are replaced. Any number of ranks can load what any number has saved.
    Every file is compared with its hash before anything is loaded, and nothing is unpickled. Under ``phalanx run``, a
    snapshot in memory is loaded if it is newer.

    What comes back is equal bit for bit, and of the class that was saved:

    - A tensor in `state` is filled if it has the same shape, and a dtype that holds every saved value; otherwise the
      checkpoint is refused. None or a plain value is replaced by a new tensor on the CPU, which has no gradient, does
      not require one, and belongs to no subclass. New tensors share memory if the saved ones did; views that are not
      contiguous, such as columns, become tensors of their own.
    - A module or an optimizer is restored by its own ``load_state_dict``, which decides what it accepts, and casts
      values to the dtypes of the existing tensors.
    - A named tuple gets the class that it has in `state`, or else a new class with the same name and fields. A
      ``defaultdict`` keeps a factory that is a built-in class. A mapping of any other class is refused unless `state`
      has a mapping of that class, or a dict, in the same place. An object's ``load_state_dict`` gets a dict in place of
      such a mapping.
    - The other classes of Python and NumPy are kept: dict, ``OrderedDict``, ``Counter``, list, tuple, set, frozenset,
      deque, str, bytes, bytearray, numbers, paths, arrays and scalars. An object that is in several places comes back
      as several objects; subclasses of arrays come back as plain arrays.

    If this job is still writing a save, `load` waits for it. If another job is saving to the folder, a line says so.

    Args:
        folder: Folder of the checkpoints, as passed to `save`, or of a run that has them in ``checkpoints``.
        state: State of the form that was saved; saved entries that `state` lacks are not loaded.
        step: Step of the checkpoint; "latest" is the newest undamaged one, and a warning names newer damaged ones.
            "best" is the checkpoint on disk with the best metric: the smallest or the largest, as ``save(keep=...)`` or
            a Trainer has recorded.
        strict: Whether a checkpoint that lacks an entry of `state` is refused.
        missing: Action if there is no checkpoint: "note" prints a line on rank 0 and returns None, "ignore" returns
            None, "error" raises.

    Returns:
        The checkpoint that was loaded; None if there is no checkpoint.
    Raises:
        ValueError: `missing` has any other value.
        TypeError: `state` is not a dictionary.
        CheckpointError: There is no undamaged checkpoint of that step, the checkpoint does not fit `state`, or not all
            ranks call `load`; raised on every rank.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> phalanx.checkpoint.save("runs/linear", {"model": model, "epoch": 3}, step=100, wait=True)
        >>> state = {"model": nn.Linear(2, 1), "epoch": 0}
        >>> phalanx.checkpoint.load("runs/linear", state)
        Loaded(step=100, source='disk')
        >>> state["epoch"], torch.equal(state["model"].weight, model.weight)
        (3, True)
    """
    if missing not in ("note", "ignore", "error"):
        raise ValueError(f'checkpoint.load: missing must be "note", "ignore" or "error", got {missing!r}')
    refuse_no_mapping("load", state)
    return _load(folder, state, step, strict=strict, missing=missing)


def load_run(folder: str, state: MutableMapping[str, Any], *, strict: bool) -> Loaded | None:
    """Load the latest checkpoint for a Trainer. The state's first entry, the trainer's own, is restored first.

    The trainer's entry can thus refuse a checkpoint before anything else is restored.

    Where an error of `load` would advise ``strict=False``, the error names the Trainer's equivalent setting instead.
    """
    return _load(folder, state, "latest", strict=strict, missing="ignore", is_of_run=True)


def _load(
    folder: str | os.PathLike[str],
    state: MutableMapping[str, Any],
    step: int | str,
    *,
    strict: bool,
    missing: str,
    is_of_run: bool = False,
) -> Loaded | None:
    with writer.phase(LOADING):
        loaded = _load_best(folder, state, step, strict=strict, missing=missing, is_of_run=is_of_run)
    if loaded is not None:
        writer.note(LOADED, loaded.step)
    return loaded


def _load_best(
    folder: str | os.PathLike[str],
    state: MutableMapping[str, Any],
    step: int | str,
    *,
    strict: bool,
    missing: str,
    is_of_run: bool,
) -> Loaded | None:
    ranks = RankGroup()
    pending.await_own()
    require_all("load")  # before any rank looks for candidates: another rank may still be writing
    memory().asked.add(os.path.abspath(folder))
    holdings = ranks.gather(memory().holdings())
    path, candidates = _agreed_candidates(os.path.abspath(folder), step, ranks, holdings)
    if not candidates:
        _say_missing(path, ranks.rank, missing)
        return None
    damage: list[str] = []
    for source, number in candidates:
        images, problems = _check(path, source, number, ranks, holdings)
        damage += problems
        if problems:
            continue
        about = f"of step {number} from {path}"
        restoring = _Restoring(images, ranks, strict=strict, is_of_run=is_of_run, about=about)
        if is_of_run:
            first = next(iter(state))
            restoring.restore({first: state[first]})
        if source == "memory" and memory().has_holes and (problems := restoring.fill(state)):
            damage += problems
            continue
        restoring.restore(state)
        if memory().is_kept:
            drop_gradients(state)  # they are of the step in which another rank failed; a new process has none
        if damage and ranks.rank == 0:
            warn_caller(f"{_joined(damage)}. The checkpoint of step {number} is loaded instead")
        return Loaded(number, source)
    raise CheckpointError(
        f"rank {ranks.rank}: checkpoint.load: no whole checkpoint in {printable(path)}: {_joined(damage)}. "
        "Put a whole copy there, or start over in another folder",
        op="load",
        entry="checkpoint-damaged",
    )


def why_not_loadable() -> str:
    """Return why this process could not repeat its calls of `load`; "" if it could."""
    holdings = [memory().holdings()]
    if not memory().asked:
        return "it has not called phalanx.checkpoint.load"
    for folder in sorted(memory().asked):
        problem, _, candidates = _candidates(folder, "latest", holdings)
        if not (problem or candidates):  # a save that is still running may become the first checkpoint
            pending.await_every_rank()
            problem, _, candidates = _candidates(folder, "latest", holdings)
        if problem or not candidates:
            return problem or f"there is no snapshot or checkpoint yet for {folder}"
    return ""


def _joined(damage: Sequence[str]) -> str:
    return printable("; ".join(damage), keep="\n")


def _agreed_candidates(
    folder: str, step: int | str, ranks: RankGroup, holdings: Sequence[Sequence[Holding]]
) -> tuple[str, list[tuple[str, int]]]:
    """Return the folder of the checkpoints, and the checkpoints to try, best first. Rank 0 finds both for all ranks.

    Raises:
        CheckpointError: The ranks load different checkpoints, or there is no checkpoint of that step; raised on every
            rank.
    """
    found = _candidates(folder, step, holdings) if ranks.rank == 0 else ("", "", [])
    answers = ranks.gather((folder, step, *found))
    if any(answer[:2] != answers[0][:2] for answer in answers):
        raise_problems("load", [f"loads step {answer[1]} from {answer[0]}" for answer in answers])
    problem, path, candidates = answers[0][2:]
    raise_problems("load", [problem])
    if ranks.rank == 0 and step == "latest" and (lost := lost_of(holdings, digest_of(path))) is not None:
        parts = f"{'the part' if len(lost.numbers) == 1 else 'parts'} of {named('rank', lost.numbers)}"
        where = f"step {candidates[0][1]} on disk" if candidates else "the beginning"
        _say(f"no host has {parts} of the snapshot of step {lost.step} in memory any more: resuming from {where}")
    if ranks.rank == 0 and candidates and (under_way := folders.say_under_way(folders.steps_under_way(path))):
        _say(f"{path}: {under_way}: resuming from step {candidates[0][1]}")
    return path, candidates


def _say_missing(path: str, rank: int, missing: str) -> None:
    said = printable(folders.say_missing(path))
    if missing == "error":
        raise CheckpointError(
            f"rank {rank}: checkpoint.load: {said}: name the folder of a run or of its checkpoints",
            op="load",
            entry="checkpoint-missing",
        )
    if rank == 0 and (missing == "note" or folders.steps_under_way(path)):
        _say(f"{said}: starting from the beginning")


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the log may be on a disk that is full
        print(f"phalanx: checkpoint.load: {text}", file=sys.stderr, flush=True)


def _candidates(
    given: str, step: int | str, holdings: Sequence[Sequence[Holding]]
) -> tuple[str, str, list[tuple[str, int]]]:
    """Return a problem or an empty string, the folder of the checkpoints, and the candidates to load, best first."""
    if os.path.isfile(given):
        return f"{given} is a file, and load takes a folder to which save has written{_way_to_read(given)}", given, []
    try:
        path = given if newest_of(holdings, digest_of(given)) is not None else folders.find(given)
        published = folders.steps(path)
    except OSError as error:
        return f"can't read {given}: {error.strerror}", given, []
    if step == "best" and published:
        try:
            step = find_best(path)
        except ValueError as error:
            return str(error), path, []
    elif step == "best":
        return "", path, []
    if step != "latest":
        if step not in published:
            under_way = folders.steps_under_way(path)
            hint = f". {folders.say_under_way(under_way).capitalize()}" if step in under_way else ""
            return f"{path!r} has no checkpoint of step {step}; it has steps {published or 'none'}{hint}", path, []
        return "", path, [("disk", int(step))]
    on_disk = [("disk", number) for number in reversed(published)]
    in_memory = newest_of(holdings, digest_of(path))
    if in_memory is not None:
        older = [entry for entry in on_disk if entry[1] <= in_memory.step]
        on_disk = [*(entry for entry in on_disk if entry[1] > in_memory.step), ("memory", in_memory.step), *older]
    return "", path, on_disk


def _way_to_read(file: str) -> str:
    """Return a hint with the call that loads this file of weights; empty if its name does not tell the format."""
    if file.endswith((".pt", ".pth", ".bin", ".ckpt")):
        call = f"torch.load({file!r}, map_location='cpu')"
    elif file.endswith(".safetensors"):
        call = f"safetensors.torch.load_file({file!r})"
    else:
        return ""
    return f". Weights in a file: model.load_state_dict({call})"


def _check(
    path: str, source: str, step: int, ranks: RankGroup, holdings: Sequence[Sequence[Holding]]
) -> tuple[list[Image], list[str]]:
    """Return the checkpoint's images, and the problems that any rank found with them: one for each damaged file."""
    problem, is_seen = "", False
    images: list[Image] = []
    try:
        if source == "memory":
            newest = newest_of(holdings, digest_of(path))
            assert newest is not None  # otherwise, memory would not be a candidate
            images = memory().read(newest)
            check(images, step, [_own(images, ranks)])
        else:
            found = folders.read_manifest(path, step)
            mine = sorted(found.files)[ranks.rank :: ranks.world_size]
            problem = "; ".join(folders.problems_of(found, mine))
            is_seen = bool(problem)
            owner = ranks.rank if found.world_size == ranks.world_size else 0
            images = images_of(found, [owner]) if not problem else []
    except Damaged as error:
        problem = str(error)
    except Exception as error:  # a damaged image can make a parser raise anything
        problem = (
            f"the checkpoint of step {step} {'on' if source == 'disk' else 'in'} {source} can't be read: {error!r}"
        )
    said = gather("load", (is_seen, problem))
    seen = [one for is_seen, one in said if is_seen]  # problems found by hashing, which explain all other problems
    return images, list(dict.fromkeys(seen or [one for _, one in said if one]))


def _own(images: Sequence[Image], ranks: RankGroup) -> int:
    """Return the index of the image whose values this rank gets: its own, or 0 if a different number of ranks saved."""
    owners = [image.metadata.get("owner", [rank, len(images)]) for rank, image in enumerate(images)]
    own = [ranks.rank, ranks.world_size]
    return owners.index(own) if own in owners else 0


def images_of(checkpoint: Checkpoint, owners: Iterable[int] | None = None) -> list[Image]:
    """Return each rank's image, in rank order.

    Args:
        checkpoint: Checkpoint to read.
        owners: Ranks whose trees are needed; by default all.

    Raises:
        Damaged: One of these trees, or a tensor in it, is incomplete.
    """
    try:
        names = map(folders.file_of, range(checkpoint.world_size))
        images = [Image(folders.map_file(checkpoint, name)) for name in names]
        check(images, checkpoint.step, range(checkpoint.world_size) if owners is None else owners)
    except Exception as error:  # a damaged image can make a parser raise anything
        raise Damaged(f"{checkpoint.path} can't be read: {error!r}") from error
    return images


def check(images: Sequence[Image], step: int, owners: Iterable[int]) -> None:
    """Check that the images belong to `step` and that the trees of `owners` can be unpacked; may raise any error."""
    for rank, image in enumerate(images):
        said = [image.metadata[key] for key in ("step", "rank", "world_size")]
        if said != [step, rank, len(images)] or type(image.metadata["is_alike"]) is not bool:
            found = f"rank {said[1]!r} of {said[2]!r} at step {said[0]!r}"
            raise ValueError(f"expected rank {rank} of {len(images)} at step {step}, found {found}")
    for owner in owners:
        unpack(images[owner].metadata["tree"], Reader(images, owner).check)


class _Restoring:
    """A checkpoint's images, from which every rank restores its state.

    Args:
        images: Images of all ranks that saved, in rank order.
        ranks: All ranks of the job.
        strict: Whether a checkpoint that lacks an entry of the state is refused.
        is_of_run: Whether errors give advice for a Trainer.
        about: Step and folder as text, for errors.
    """

    def __init__(self, images: Sequence[Image], ranks: RankGroup, *, strict: bool, is_of_run: bool, about: str) -> None:
        self._images, self._ranks = images, ranks
        self._strict, self._is_of_run, self._about = strict, is_of_run, about
        self._own = _own(images, ranks)

    def restore(self, state: MutableMapping[str, Any]) -> None:
        """Fill `state`. Every rank calls this; if it fails on one rank, all ranks raise the same error."""
        reader = Reader(self._images, self._own)
        self._on_every_rank(lambda: restore(state, self._tree(), reader, strict=self._strict))

    def fill(self, state: MutableMapping[str, Any]) -> list[str]:
        """Fetch from other hosts what `state` needs and this host lacks; return the problems of all ranks, if any."""
        reader = Reader(self._images, self._own)
        self._on_every_rank(lambda: survey(state, self._tree(), reader.survey, strict=self._strict))
        problem = ""
        try:
            memory().fill(reader.needed)
        except (OSError, ValueError) as error:
            step = self._images[0].metadata["step"]
            problem = f"the checkpoint of step {step} in memory can't be read: {error!r}"
        return list(dict.fromkeys(filter(None, gather("load", problem))))

    def _tree(self) -> Json:
        """Return the tree of the image whose values this rank gets.

        Raises:
            ValueError: Each rank saved tensors of its own, and the number of ranks has changed since.
        """
        num_saved, num_ranks = len(self._images), self._ranks.world_size
        own = self._images[self._own]
        if not own.metadata["is_alike"] and num_saved != num_ranks:
            raise ValueError(
                f"{num_saved} ranks saved tensors of their own, so only {num_saved} ranks can load them, but "
                f"there are {num_ranks}: start {num_saved} ranks"
            )
        return own.metadata["tree"]

    def _on_every_rank(self, act: Callable[[], None]) -> None:
        """Call `act`; if it raises on any rank, raise an error about that on every rank."""
        problem, cause = "", None
        try:
            act()
        except Exception as error:  # a load_state_dict() may raise anything, and the other ranks must learn of it
            problem, cause = reason_of(error), error
            if self._is_of_run:
                problem = problem.replace(NOT_STRICT, NOT_STRICT_IN_TRAINER)
        raise_problems("load", gather("load", problem), cause, self._about)
