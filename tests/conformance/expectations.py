"""What phalanx must make of each test of torch's exam: Gloo's passes, and what differs.

`gloo_passes/` holds one list per release of torch and world size, written by

    python -m tests.conformance.exam --backend gloo --world-size 2 --write-baseline

The rule is passes(phalanx) >= passes(Gloo), changed only by the tables below. They
are checked: a name that the exam no longer has, or whose entry is no longer true, is a
complaint like a failure.
"""

import importlib.metadata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ._runner import Result

_LISTS = Path(__file__).parent / "gloo_passes"


@dataclass(frozen=True)
class Difference:
    """Why phalanx fails a test that Gloo passes, and on which releases (empty: on all)."""

    reason: str
    torch: tuple[str, ...] = ()


# Tests that Gloo passes and phalanx fails by intention.
KNOWN_DIFFERENCES: dict[str, Difference] = {}

# Tests that Gloo passes and phalanx in the place of Gloo fails by intention.
IN_PLACE_DIFFERENCES: dict[str, Difference] = {
    "test_ddp_logging_data_cpu": Difference(
        "the C++ logger of torch's DDP must not hear gloo, since it would read a C++ ProcessGroupGloo", ("2.15",)
    ),
}

# Tests that Gloo fails and phalanx must pass. ProcessGroupGloo::alltoall refuses lists
# of tensors whose sizes differ ("invalid tensor size at index 1").
BEYOND_GLOO: tuple[str, ...] = (
    "test_all_to_all",
    "test_all_to_all_complex",
    "test_all_to_all_full_group",
    "test_all_to_all_group",
)


def torch_release() -> str:
    """Return the installed torch's release as the lists name it, for example ``"2.15"``."""
    return ".".join(importlib.metadata.version("torch").split(".")[:2])


def list_path(world_size: int) -> Path:
    """Return where the installed torch's list for `world_size` is or would be."""
    return _LISTS / f"torch-{torch_release()}-world-{world_size}.txt"


def read_gloo_passes(world_size: int) -> list[str]:
    """Return the names of the tests that Gloo passes on the installed torch.

    Raises:
        FileNotFoundError: There is no list for this release of torch and world size.
    """
    lines = list_path(world_size).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def write_gloo_passes(world_size: int, names: Iterable[str]) -> Path:
    """Write the list of the installed torch and return its path."""
    path = list_path(world_size)
    path.parent.mkdir(exist_ok=True)
    head = f"# python -m tests.conformance.exam --backend gloo --world-size {world_size}"
    path.write_text("\n".join([f"{head} --write-baseline", *sorted(names), ""]), encoding="utf-8")
    return path


def expected_outcomes(world_size: int, *, in_place: bool = False) -> dict[str, str]:
    """Return ``"passed"`` or ``"failed"`` for each test that phalanx has to sit.

    Args:
        in_place: Whether phalanx stands in the place of Gloo.

    Raises:
        FileNotFoundError: There is no list for this release of torch and world size.
    """
    expected = dict.fromkeys(read_gloo_passes(world_size), "passed")
    for name in BEYOND_GLOO:
        if not (name.endswith("_group") and "full" not in name and world_size < 3):
            expected[name] = "passed"
    for name, difference in (KNOWN_DIFFERENCES | IN_PLACE_DIFFERENCES if in_place else KNOWN_DIFFERENCES).items():
        if not difference.torch or torch_release() in difference.torch:
            expected[name] = "failed"
    return expected


def complaint(result: Result, expected: str) -> str | None:
    """Return what is wrong with `result`, or None if it is as expected."""
    if result.outcome == expected:
        return None
    if expected == "failed":
        return f"{result.name} {result.outcome}: its entry among the differences is out of date"
    return f"{result.name} {result.outcome}, where it has to pass:\n{result.detail}"
