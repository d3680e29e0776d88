"""What can't be forked, and how many ranks there is room for."""

from __future__ import annotations

from typing import Any

import pytest


def check_room(world_size: int) -> None:
    pass


def check_fork(item: pytest.Item) -> None:
    pass


def words_of_refused_fork(world_size: int, error: OSError) -> str:
    return f"{world_size} ranks can't be forked: {error}"


_ = Any
