"""phalanx passes torch's own exam wherever Gloo passes it, at world sizes 2 and 3.

Every test that Gloo passes on a CPU is a case here. Two ranks sit those of three again, which
``make slow`` has. The tests that the exam skips on Gloo, and world size 4, are left to

    python -m tests.conformance.exam --backend phalanx --world-size 4 --check
"""

import contextlib
from collections.abc import Iterator

import pytest

from .exam import Exam
from .expectations import complaint, expected_outcomes, list_path, torch_release

BACKEND = "phalanx"
WORLD_SIZES = (3, 2)


def _cases() -> Iterator[object]:
    seen: set[str] = set()
    for world_size in WORLD_SIZES:
        if not list_path(world_size).exists():
            reason = f"Gloo has not sat the exam of torch {torch_release()}; see {__package__}"
            yield pytest.param(world_size, "", "", marks=pytest.mark.skip(reason), id="no list")
            continue
        for name, expected in sorted(expected_outcomes(world_size).items()):
            marks = [pytest.mark.slow] * (name in seen)
            yield pytest.param(world_size, name, expected, id=f"{world_size} ranks-{name}", marks=marks)
            seen.add(name)


@pytest.fixture(scope="module")
def exams(request: pytest.FixtureRequest) -> Iterator[dict[int, Exam]]:
    """Per world size of the tests to be run, a process that has loaded the exam and forks each test's ranks."""
    here = [item for item in request.session.items if item.path == request.path]
    sizes = {item.callspec.params["world_size"] for item in here if isinstance(item, pytest.Function)}
    with contextlib.ExitStack() as stack:
        yield {size: stack.enter_context(Exam(BACKEND, size)) for size in sizes}


@pytest.mark.parametrize(("world_size", "name", "expected"), list(_cases()))
def test_phalanx_passes_where_gloo_passes(exams: dict[int, Exam], world_size: int, name: str, expected: str) -> None:
    exam = exams[world_size]
    assert name in exam.names, f"the exam of torch {torch_release()} has no test {name}"
    problem = complaint(exam.run(name), expected)
    assert problem is None, problem
