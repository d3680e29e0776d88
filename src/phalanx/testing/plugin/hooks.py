"""The hooks that pytest calls: options, the mark ``ranks``, and the fixtures of a marked test.

With ``--fast-ranks``, processes that tests themselves start are forked from a server, see `testing.fast_ranks`.

If phalanx is installed, pytest always loads this module. So it contains only hooks and fixtures, and imports all other
modules only once a marked test has been collected.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from phalanx.session.session import Session

_MARK = "ranks"
_PARAM = "_ranks"
"""Name of the fixture whose parameter is the world size, for a mark with several world sizes."""
_NOT_LINUX = (
    "@pytest.mark.ranks: ranks are forked, which phalanx does on Linux alone; here skip the test: "
    "@pytest.mark.skipif(sys.platform != 'linux', reason='ranks need Linux')"
)

# pytest rewrites the asserts in all modules of a plugin's distribution. This code excludes phalanx's modules.
for _finder in sys.meta_path:
    _rewritten: Any = getattr(_finder, "_must_rewrite", ())
    if "phalanx" in _rewritten:
        _rewritten.discard("phalanx")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("phalanx").addoption(
        "--fast-ranks",
        action="store_true",
        help="fork processes that tests start by spawn or forkserver from a server that has imported their packages",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--fast-ranks"):
        from phalanx.testing import fast_ranks

        has_xdist = config.pluginmanager.hasplugin("xdist")
        config.pluginmanager.register((fast_ranks.XdistPlugin if has_xdist else fast_ranks.Plugin)(config))
    config.addinivalue_line(
        "markers",
        "ranks(world_size, ..., *, backend='phalanx', init=True, init_method=None, group_timeout_s=None, env={}, "
        "hosts=[], timeout_s=60): run the test on that many ranks, in a process group of its own; once for each of "
        "several world sizes (phalanx).",
    )


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Make ``torch.cuda.is_available()`` harmless in a module with marked tests; otherwise it breaks CUDA in forks."""
    path = getattr(collector, "path", None) if isinstance(collector, pytest.Module) else None
    if path is not None and path.is_file() and b"mark.ranks" in path.read_bytes():
        from phalanx import _env

        name = "PYTORCH_NVML_BASED_CUDA_CHECK"
        _env.update({name: _env.environment().get(name, "1")})


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker(_MARK)
    if mark is None:
        return
    from phalanx.testing.plugin.marks import sizes_of

    sizes = sizes_of(mark)
    if len(sizes) > 1:
        metafunc.fixturenames.append(_PARAM)
        metafunc.parametrize(_PARAM, sizes, indirect=True, ids=[f"{size}ranks" for size in sizes])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker(_MARK) is not None]
    if marked and sys.platform != "linux":
        for item in marked:
            _set_setup(item, functools.partial(pytest.fail, _NOT_LINUX, pytrace=False))
    elif marked:
        from phalanx.testing.plugin.item import prepare

        for item in marked:
            prepare(item)


def _set_setup(item: Any, setup: Callable[[], None]) -> None:
    item.setup = setup


@pytest.hookimpl(hookwrapper=True, trylast=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome: Any = yield
    shown = vars(item).pop("_phalanx_shown", None)
    if call.when == "call" and shown is not None and call.excinfo is not None:
        outcome.get_result().longrepr = shown


@pytest.hookimpl(tryfirst=True)
def pytest_enter_pdb() -> None:
    _in_rank("enter_debugger")


@pytest.hookimpl(trylast=True)
def pytest_leave_pdb() -> None:
    _in_rank("leave_debugger")


def _in_rank(name: str) -> None:
    """Call the function `name` of `on_rank` if this process has loaded `on_rank`, as ranks have."""
    if (side := sys.modules.get("phalanx.testing.plugin.on_rank")) is not None:
        getattr(side, name)()


# ---------------------------------------------------------------- fixtures


@pytest.fixture(name=_PARAM)
def _one_of_the_sizes(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> int:
    """Number of ranks that run this test, as given to @pytest.mark.ranks."""
    from phalanx.testing.plugin.item import world_size_of

    return world_size_of(request)


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> int:
    """Rank of this process among the ranks that run this test. Fixtures that request it are computed on each rank."""
    from phalanx.testing.plugin.on_rank import rank_of

    return rank_of(request)


@pytest.fixture
def group(rank: int) -> Session:
    """Session of this rank, as returned by phalanx.init(), with rank, device, barrier() and gather()."""
    from phalanx.testing.plugin.on_rank import session_of

    return session_of(rank)
