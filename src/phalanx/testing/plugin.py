"""The pytest plugin of phalanx; inert until an option or a mark asks for it."""

from __future__ import annotations

from typing import Any


def pytest_addoption(parser: Any) -> None:
    parser.getgroup("phalanx").addoption(
        "--fast-ranks",
        action="store_true",
        help="fork the processes that tests start by spawn or forkserver from one that has imported what they use",
    )


def pytest_configure(config: Any) -> None:
    if config.getoption("--fast-ranks"):
        from phalanx.testing import fast_ranks

        has_xdist = config.pluginmanager.hasplugin("xdist")
        config.pluginmanager.register((fast_ranks.XdistPlugin if has_xdist else fast_ranks.Plugin)(config))
