"""Lines that only ranks of `inner_few` run."""


def of_rank(rank: int) -> int:
    if rank == 0:
        return 1
    return 2


def of_nobody() -> int:
    return 3
