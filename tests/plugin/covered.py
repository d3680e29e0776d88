"""Lines that only ranks of `inner_few` run."""


def of_rank(rank: int) -> int:
    if rank == 0:
        first = 1
    else:
        first = 2
    return first


def of_nobody() -> int:
    return 3
