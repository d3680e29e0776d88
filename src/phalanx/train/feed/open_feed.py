"""`open_feed`: the feed for data and settings, or the error that says why the two do not fit."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch.utils import data as torch_data

from phalanx._text import counted
from phalanx.data.batches import GivenBatches, GlobalBatches
from phalanx.data.loader import DIVIDING_LOADER
from phalanx.data.parts import have_the_same, refuse_different
from phalanx.train.feed.dataset_feed import DatasetFeed
from phalanx.train.feed.feed import Collate, Feed, is_dataset
from phalanx.train.feed.loader_feed import LoaderFeed, is_divided
from phalanx.train.settings import Settings
from phalanx.wire.rank_group import RankGroup


def open_feed(
    data: Any,
    settings: Settings,
    batch_size: int,
    ranks: RankGroup,
    *,
    given: Collection[str] = (),
    collate_fn: Collate | None = None,
    batch_sampler: Iterable[Iterable[int]] | None = None,
) -> Feed:
    """Return the feed of a map-style dataset, or of a loader. Every rank must call this.

    Args:
        data: Dataset that the ranks divide, or loader of this rank's own batches.
        settings: Settings of the trainer.
        batch_size: Number of a dataset's samples in a step, over all ranks.
        ranks: All ranks of the job.
        given: Names of the settings that the script has set.
        collate_fn: Function that makes a batch of a dataset's samples.
        batch_sampler: Sampler of batches over all ranks, to use instead of `batch_size`.

    Raises:
        ValueError: `data` does not fit the settings or the number of ranks.
    """
    if is_dataset(data):
        return _open_dataset(data, settings, batch_size, ranks, given, collate_fn, batch_sampler)
    for problem, value in {
        'deterministic="world" divides the data itself: pass fit() a dataset': settings.deterministic,
        "micro_batch_size divides a dataset's batches; a loader has its own": settings.micro_batch_size,
        "collate_fn makes batches of a dataset; a loader has its own: pass it there": collate_fn,
        "batch_sampler divides a dataset; a loader has its own: pass it there": batch_sampler,
    }.items():
        if value is not None:
            raise ValueError(f"Trainer: {problem}")
    if ranks.world_size > 1 and not is_divided(data, ranks):
        raise ValueError(
            "Trainer: this loader gives the same samples to every rank: pass the dataset itself, or "
            f"{DIVIDING_LOADER}. If its batch sampler "
            "divides them: phalanx.DataLoader(dataset, batch_sampler=batch_sampler, is_own_part=True)"
        )
    return LoaderFeed(data, settings.seed, ranks=ranks, without_effect=_without_effect(data, settings, ranks, given))


def _open_dataset(
    dataset: Any,
    s: Settings,
    batch_size: int,
    ranks: RankGroup,
    given: Collection[str],
    collate_fn: Collate | None,
    batch_sampler: Iterable[Iterable[int]] | None,
) -> DatasetFeed:
    refuse_different(dataset, ranks)
    length = len(dataset)
    if length < ranks.world_size:
        if length == 0:
            raise ValueError("Trainer: the dataset has no samples; its len() is 0")
        raise ValueError(
            f"Trainer: the dataset has {counted(length, 'sample')}, fewer than the {ranks.world_size} ranks, each of "
            "which needs at least one: train on fewer ranks or on more samples"
        )
    num_parts = s.virtual_shards if s.deterministic else None
    _check_number_of_ranks(batch_size if batch_sampler is None else None, num_parts, ranks.world_size)
    sizes: dict[str, Any] = {"micro_batch_size": s.micro_batch_size, "num_parts": num_parts, "seed": s.seed}
    without_effect: list[str] = []
    if batch_sampler is None:
        batches = GlobalBatches(length, batch_size, drop_last=s.drop_last, **sizes)
    else:
        _check_batch_sampler(batch_sampler, s)
        batches = GivenBatches(length, batch_sampler, **sizes)
        if not have_the_same(batches.batches, ranks):
            raise ValueError(
                "Trainer: batch_sampler must give the same batches on every rank, which takes its part of each"
            )
        if "global_batch_size" in given:
            without_effect = _check_size_of_batches(batch_sampler, s.global_batch_size)
    return DatasetFeed(
        dataset, batches, s.num_workers, s.seed,
        collate_fn=collate_fn, seeds_samples=s.deterministic is not None, without_effect=without_effect,
    )  # fmt: skip


def _check_number_of_ranks(batch_size: int | None, num_parts: int | None, world_size: int) -> None:
    """Refuse batches, or parts of batches, that can't be divided among the ranks.

    Raises:
        ValueError: There are too many ranks, or the number of parts is not a multiple of the number of ranks.
    """
    if batch_size is not None and batch_size < world_size:
        raise ValueError(
            f"Trainer: global_batch_size={batch_size} is too small for {world_size} ranks, each of which takes a part "
            f"of a batch: pass global_batch_size={world_size} or more, or start fewer ranks"
        )
    if num_parts is not None and num_parts % world_size:
        raise ValueError(
            f'Trainer: deterministic="world" computes a batch in virtual_shards={num_parts} parts, which {world_size} '
            "ranks can't share alike: start 1, 2, 4 or another power of two, with virtual_shards at least as large"
        )


def _without_effect(loader: Any, s: Settings, ranks: RankGroup, given: Collection[str]) -> list[str]:
    """Return those of the given settings that have no effect, because the loader makes the batches.

    Raises:
        ValueError: The loader's batches differ from `Settings.global_batch_size`.
    """
    names = [name for name, value in (("drop_last", s.drop_last), ("on_resize", s.on_resize == "scale")) if value]
    if "global_batch_size" not in given:
        return names
    sizes = ranks.gather(getattr(loader, "batch_size", None))
    if not all(isinstance(size, int) for size in sizes):
        return ["global_batch_size", *names]
    if s.on_resize == "keep" and sum(sizes) != s.global_batch_size:
        raise ValueError(
            f"Trainer: global_batch_size={s.global_batch_size}, but a step takes the loader's batches of all ranks, "
            f"{counted(sum(sizes), 'sample')} ({counted(len(sizes), 'rank')}, batch_size={sizes[ranks.rank]}): pass "
            "the dataset itself, which is then divided as asked for, or leave global_batch_size out"
        )
    return names


def _check_batch_sampler(batch_sampler: Any, s: Settings) -> None:
    """Refuse a batch sampler that makes the batches of a single rank, and settings that the sampler replaces.

    Raises:
        ValueError: The sampler and the settings do not fit together.
    """
    if s.drop_last or s.on_resize == "scale":
        raise ValueError("Trainer: with batch_sampler, which makes the batches, leave out drop_last and on_resize")
    samplers = batch_sampler, getattr(batch_sampler, "sampler", None)
    if any(isinstance(sampler, torch_data.DistributedSampler) for sampler in samplers):
        raise ValueError(
            "Trainer: batch_sampler must make the batches of all ranks together, and a DistributedSampler makes those "
            "of one: fit(DataLoader(dataset, batch_sampler=batch_sampler))"
        )


def _check_size_of_batches(batch_sampler: Any, global_batch_size: int) -> list[str]:
    """Return ``["global_batch_size"]`` if the setting has no effect on the sampler's batches, else an empty list.

    Raises:
        ValueError: The sampler makes batches of another size.
    """
    size = getattr(batch_sampler, "batch_size", None)
    if not isinstance(size, int):
        return ["global_batch_size"]
    if size != global_batch_size:
        raise ValueError(
            f"Trainer: global_batch_size={global_batch_size}, but batch_sampler makes batches of "
            f"{counted(size, 'sample')}, over all ranks: make both the same, or leave global_batch_size out"
        )
    return []
