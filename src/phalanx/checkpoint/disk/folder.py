"""A folder of checkpoints on disk: one folder for each step, published by a rename.

step-00000100/rank_00000.safetensors ...   what each rank saved
step-00000100/manifest.json                sizes and hashes of these files, written last
latest                                     the name of the newest checkpoint
.step-00000200-1f9c.part/                  a draft: being written, or left behind by a killed job
.step-00000200-1f9c.part/writing           locked by each rank that is writing; no locks: nobody is writing the draft
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import hashlib
import json
import mmap
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from io import FileIO
from typing import Any

from phalanx._errors import CheckpointError
from phalanx._text import named
from phalanx.checkpoint.disk.claim import Fence
from phalanx.wire.files import lock_within, open_regular, write_whole

_FORMAT = 1
_MANIFEST = "manifest.json"
_CHUNK_BYTES = 8 << 20
_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})")
_WRITING = "writing"
_LEFTOVER = re.compile(r"\.step-[0-9]+-[0-9a-f]{8}\.part(\.old)?|latest\.[0-9]+\.part")
_DRAFT = re.compile(r"\.step-([0-9]+)-[0-9a-f]{8}\.part")
_MARK_S = 1.0
_END_OF_TIME_S = 1 << 40  # limit of `saved_at`, in seconds; time.localtime() accepts it


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint, as its manifest describes it.

    Attributes:
        step: Step of the training.
        path: Folder of this checkpoint.
        size_bytes: Size of all its files.
        world_size: Number of ranks that saved it.
        saved_at: Time at which the save began, in seconds since 1970.
        metric: Score that was passed to `save`, or None.
        files: Size in bytes and SHA-256 of each file, by name.
        epoch: Epoch of the claim under which the checkpoint was saved (see `claim`); 0 if the folder was not claimed.
        best_is_least: Whether the smallest metric is the best, as passed to ``save(keep=...)``; None if it was not
            passed.

    Example:
        >>> phalanx.checkpoint.save("runs/linear", {"weight": torch.ones(3)}, step=1, wait=True)
        >>> [checkpoint] = phalanx.checkpoint.list_checkpoints("runs/linear")
        >>> checkpoint.step, checkpoint.world_size
        (1, 1)
    """

    step: int
    path: str
    size_bytes: int
    world_size: int
    saved_at: float
    metric: float | None
    files: Mapping[str, Mapping[str, Any]]
    epoch: int = 0
    best_is_least: bool | None = None


class Damaged(CheckpointError):
    """A checkpoint differs from what was saved."""

    entry = ""


def path_of(folder: str, step: int) -> str:
    return os.path.join(folder, f"step-{step:08}")


def file_of(rank: int) -> str:
    return f"rank_{rank:05}.safetensors"


def steps(folder: str) -> list[int]:
    """Return the steps of the published checkpoints, damaged or not, oldest first."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def find(folder: str | os.PathLike[str]) -> str:
    """Return the folder that holds the checkpoints: `folder`, or its ``checkpoints`` if only that subfolder has any."""
    path = os.fspath(folder)
    below = os.path.join(path, "checkpoints")
    return below if not steps(path) and os.path.isdir(below) and steps(below) else path


def find_steps(folder: str) -> tuple[str, list[int]]:
    """Return the folder that holds the checkpoints, and their steps; if `folder` is one checkpoint, its step alone."""
    path = find(folder)
    own, name = os.path.split(os.path.abspath(path))
    if not (published := steps(path)) and (match := _NAME.fullmatch(name)) and os.path.isdir(path):
        return own, [int(match[1])]
    return path, published


def say_missing(folder: str) -> str:
    """Return the message for a folder without checkpoints."""
    said = f"{folder!r} {'holds no checkpoint' if os.path.isdir(folder) else 'is not a folder'}"
    under_way = say_under_way(steps_under_way(folder))
    return f"{said} yet: {under_way}" if under_way else said


def steps_under_way(folder: str) -> list[int]:
    """Return the steps whose checkpoints some process, on any host, is writing to `folder`, smallest first.

    If the folder has no checkpoints, its subfolder ``checkpoints`` is searched, too, because a run's folder has one.
    """
    found = set()
    for path in [folder] if steps(folder) else [folder, os.path.join(folder, "checkpoints")]:
        with contextlib.suppress(OSError):
            names = filter(None, map(_DRAFT.fullmatch, os.listdir(path)))
            found |= {int(match[1]) for match in names if _is_marked(os.path.join(path, match[0]))}
    return sorted(found)


def say_under_way(under_way: list[int]) -> str:
    """Return a sentence about the steps that are being saved; empty if there are none."""
    if not under_way:
        return ""
    return f"another process is saving {named('step', under_way)} there, which can be read when the save is complete"


def read_manifest(folder: str, step: int) -> Checkpoint:
    """Return the checkpoint of `step`, from its manifest.

    Raises:
        Damaged: The manifest is missing or was altered.
    """
    path = path_of(folder, step)
    name = os.path.join(path, _MANIFEST)
    try:
        with open_regular(name) as file:
            text = file.read()
        manifest = json.loads(text)
        del manifest["checksum"]
        if text != _sign(manifest).encode() or manifest["step"] != step:
            raise ValueError
        if manifest["format"] > _FORMAT:
            raise Damaged(f"{path} was written by a newer phalanx (format {manifest['format']:d})")
        return _checkpoint(step, path, manifest)
    except FileNotFoundError:
        raise Damaged(f"{name} is missing") from None
    except OSError as error:
        raise Damaged(f"{name} can't be read: {error.strerror}") from None
    except Damaged:
        raise
    except Exception:  # a damaged file can make a parser raise anything
        raise Damaged(f"{name} was altered") from None


def _checkpoint(step: int, path: str, manifest: Mapping[str, Any]) -> Checkpoint:
    """Return the checkpoint that a manifest describes; raises any kind of error if the manifest is invalid."""
    files, world_size, metric = manifest["files"], manifest["world_size"], manifest["metric"]
    if len(files) != world_size or set(files) != set(map(file_of, range(world_size))):
        raise ValueError("a rank's file is missing, or there is one too many")
    for file in files.values():
        if type(file["size_bytes"]) is not int or not re.fullmatch("[0-9a-f]{64}", file["sha256"]):
            raise ValueError("no size, or no SHA-256")
    saved_at = float(manifest["saved_at"])
    if not 0 <= saved_at < _END_OF_TIME_S:
        raise ValueError("no time")
    size_bytes = sum(file["size_bytes"] for file in files.values())
    metric, epoch = None if metric is None else float(metric), int(manifest.get("epoch", 0))
    is_least = manifest.get("best_is_least")  # earlier versions wrote neither this nor the epoch
    is_least = None if is_least is None else bool(is_least)
    return Checkpoint(step, path, size_bytes, world_size, saved_at, metric, files, epoch, is_least)


def check_file(checkpoint: Checkpoint, name: str, *, reads: bool = True) -> str:
    """Return what is wrong with a file of a checkpoint; empty if nothing is.

    Args:
        reads: Whether to compare the file's hash, rather than only its size.
    """
    path, wanted = os.path.join(checkpoint.path, name), checkpoint.files[name]
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != wanted["size_bytes"]:
                return f"{path} has {size} bytes instead of {wanted['size_bytes']}"
            if not reads:
                return ""
            digest = hashlib.sha256()
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return "" if digest.hexdigest() == wanted["sha256"] else f"{path} was altered: its SHA-256 differs"


def problems_of(checkpoint: Checkpoint, names: Iterable[str] | None = None, *, reads: bool = True) -> list[str]:
    """Return what `check_file` finds wrong with some files of a checkpoint, by default with all."""
    found = (check_file(checkpoint, name, reads=reads) for name in (checkpoint.files if names is None else names))
    return [problem for problem in found if problem]


def map_file(checkpoint: Checkpoint, name: str) -> mmap.mmap:
    """Map a file of a checkpoint into memory; changes to that memory do not reach the file."""
    with open_regular(os.path.join(checkpoint.path, name)) as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


# ---------------------------------------------------------------- writing


class Writing:
    """Marks a draft as being written by this process, until `end` or until the process ends."""

    def __init__(self, path: str) -> None:
        self._file: FileIO | None = None
        with contextlib.suppress(OSError):  # there is no mark if the draft is gone, or its file system has no locks
            self._file = open_regular(os.path.join(path, _WRITING), os.O_RDWR)
            lock_within(_MARK_S, self._file, fcntl.LOCK_SH)  # a reader that checks the mark locks the file for a moment

    def end(self) -> None:
        """Remove the mark. Idempotent."""
        if self._file is not None:
            self._file.close()


def _is_marked(path: str) -> bool:
    """Return whether any process is writing the draft at `path`."""
    name = os.path.join(path, _WRITING)
    try:
        with open_regular(name, os.O_RDWR if os.access(name, os.W_OK) else os.O_RDONLY) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # the draft was published or removed meanwhile, or its file system has no locks
        return False
    return False


@dataclasses.dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written: every rank writes its file, and the last one publishes."""

    folder: str
    step: int
    world_size: int
    path: str
    metric: float | None
    saved_at: float
    fence: Fence | None = None
    best_is_least: bool | None = None

    def write(self, rank: int, image: memoryview, sha256: Future[str]) -> None:
        """Write a rank's file, then its size and hash, which show that the file is complete."""
        name = file_of(rank)
        _write_past_cache(os.path.join(self.path, name), image)
        signed = {"size_bytes": len(image), "sha256": sha256.result()}
        # Written last: once this signature exists, another rank may publish, and so move the folder.
        write_whole(os.path.join(self.path, f"{name}.json"), json.dumps(signed))

    def publish(self) -> bool:
        """Give the checkpoint its name if all ranks have signed; return whether this call published it.

        Raises:
            OtherSide: A newer attempt has the folder. That attempt removed all drafts when it took the folder, so a
                rank that is suspended between this check and the rename has nothing left to publish.
        """
        names = [file_of(rank) for rank in range(self.world_size)]
        signatures = [os.path.join(self.path, f"{name}.json") for name in names]
        if not all(map(os.path.exists, signatures)):
            return False
        # Several ranks may see all signatures. The rank that succeeds in renaming the first signature publishes.
        claimed = os.path.join(self.path, "publisher")
        try:
            os.rename(signatures[0], claimed)
        except FileNotFoundError:  # another rank is publishing, or has published
            return False
        signatures[0] = claimed
        files = {}
        for name, signature in zip(names, signatures, strict=True):
            with open(signature) as file:
                files[name] = json.load(file)
        manifest = {
            "format": _FORMAT, "step": self.step, "world_size": self.world_size, "saved_at": self.saved_at,
            "metric": self.metric, "files": files, "epoch": self.fence.epoch if self.fence else 0,
            "best_is_least": self.best_is_least,
        }  # fmt: skip
        _write_whole(os.path.join(self.path, _MANIFEST), _sign(manifest))
        for path in signatures:
            os.unlink(path)
        _sync(self.path)
        self.check_fence()
        final = path_of(self.folder, self.step)
        if os.path.exists(final):  # this step was saved before
            _exchange(self.path, final)
            self.remove()
        else:
            os.rename(self.path, final)
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(final, _WRITING))
        _write_whole(os.path.join(self.folder, "latest"), f"{os.path.basename(final)}\n")
        return True

    def is_under_way(self, *, is_young: bool) -> bool:
        """Return whether a rank is still writing or publishing, or, if the draft is young, has yet to begin."""
        if not os.path.isdir(self.path):  # the draft was published or abandoned
            return False
        names = map(file_of, range(self.world_size))
        has_begun = all(os.path.exists(os.path.join(self.path, name)) for name in names)
        return _is_marked(self.path) or (is_young and not has_begun)

    def check_fence(self) -> None:
        """Check that this attempt may still write to the folder.

        Raises:
            OtherSide: A newer attempt has the folder.
        """
        if self.fence is not None:
            self.fence.check()

    def remove(self) -> None:
        """Remove the draft, so that a rank that is still writing can't publish it."""
        doomed = f"{self.path}.old"
        with contextlib.suppress(OSError):  # the draft is gone already, or the folder has become read-only
            os.rename(self.path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def make(folder: str) -> None:
    """Create the folder of the checkpoints if it does not exist.

    Raises:
        OSError: The folder can't be created.
    """
    try:
        os.makedirs(folder, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder) from None


def begin(
    folder: str,
    step: int,
    world_size: int,
    metric: float | None,
    fence: Fence | None = None,
    best_is_least: bool | None = None,
) -> Draft:
    """Create a draft for the ranks to write to.

    Raises:
        OSError: The draft can't be created.
    """
    path = _hidden_path(folder, step)
    os.mkdir(path)
    os.close(os.open(os.path.join(path, _WRITING), os.O_CREAT | os.O_WRONLY, 0o666))
    places = os.path.abspath(folder), os.path.abspath(path)
    return Draft(places[0], step, world_size, places[1], metric, time.time(), fence, best_is_least)


def _hidden_path(folder: str, step: int) -> str:
    """Return a new name that no reader takes for a checkpoint and that `sweep` recognizes."""
    return os.path.join(folder, f".step-{step:08}-{os.urandom(4).hex()}.part")


def sweep(folder: str) -> None:
    """Remove the drafts that killed jobs have left behind."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            if _LEFTOVER.fullmatch(name):
                if os.path.isdir(path) and not name.endswith(".old"):
                    with contextlib.suppress(OSError):  # renamed first: a live job may be publishing the draft
                        os.rename(path, f"{path}.old")
                        path = f"{path}.old"
                shutil.rmtree(path, ignore_errors=True)
                with contextlib.suppress(OSError):  # the draft is gone, or not ours to remove
                    os.unlink(path)


def remove(folder: str, doomed: Iterable[int]) -> None:
    """Remove checkpoints. Each is renamed first, so that no reader takes a half-removed one for a checkpoint."""
    for step in doomed:
        hidden = _hidden_path(folder, step)
        with contextlib.suppress(FileNotFoundError):
            os.rename(path_of(folder, step), hidden)
            shutil.rmtree(hidden, ignore_errors=True)


def _write_whole(path: str, text: str) -> None:
    """Write a file that is complete or absent, even after a power loss."""
    write_whole(path, text, durable=True)
    _sync(os.path.dirname(path))


def _write_past_cache(path: str, image: memoryview) -> None:
    """Write a file with O_DIRECT: a copy in the page cache would take memory and a core from the training.

    The cache is used where the file system lacks O_DIRECT, and for a last piece that is not a whole block.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        fd = os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        with contextlib.suppress(FileNotFoundError):  # some file systems create the file before they fail
            os.unlink(path)
        fd = os.open(path, flags, 0o666)
    try:
        written = 0
        while written < len(image):
            try:
                written += os.write(fd, image[written : written + _CHUNK_BYTES])
            except OSError as error:
                status = fcntl.fcntl(fd, fcntl.F_GETFL)
                if error.errno != errno.EINVAL or not status & os.O_DIRECT:
                    raise
                fcntl.fcntl(fd, fcntl.F_SETFL, status & ~os.O_DIRECT)
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sign(manifest: Mapping[str, Any]) -> str:
    """Return the text of a manifest, with its own checksum added."""
    checksum = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return json.dumps({**manifest, "checksum": checksum})


def _exchange(path: str, other: str) -> None:
    """Swap two folders, atomically if the file system can; otherwise `other` is missing for a moment."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    at_cwd, exchange = -100, 2
    if renameat2 is None or renameat2(at_cwd, os.fsencode(path), at_cwd, os.fsencode(other), exchange) != 0:
        between = f"{path}.old"
        os.rename(other, between)
        os.rename(path, other)
        os.rename(between, path)
