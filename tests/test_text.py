"""Numbers in messages."""

from __future__ import annotations

import pytest

from phalanx._text import named


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([3], "rank 3"),
        ([2, 0], "ranks 0 and 2"),
        ([0, 1], "ranks 0-1"),
        ([0, 1, 2, 4, 5], "ranks 0-2 and 4-5"),
        ([0, 2, 3, 7], "ranks 0, 2-3 and 7"),
    ],
)
def test_ranks_are_named_in_runs(ranks, said):
    assert named("rank", ranks) == said
