"""The benchmark of the live page and of the metrics measures both, and gives its verdicts."""

from __future__ import annotations

import re

import pytest

from phalanx.wire.web_server import missing_packages
from tests.bench._run import run_bench

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing_packages()), reason=missing_packages())]


def test_a_short_run_measures_pages_and_scrapes():
    done = run_bench("bench.web", "--ranks", "2", "--steps", "2000", "--seconds", "2")
    assert done.returncode == 0, done.stderr
    verdicts = re.findall(r"^(?:reached|missed) +(.*)$", done.stdout, re.MULTILINE)
    assert [verdict.split()[:2] for verdict in verdicts] == [
        ["a", "scrape"], ["the", "first"], ["the", "page"], ["with", "1"], ["with", "50"],
    ]  # fmt: skip
    assert not re.search(r"sends 0 kB/s", done.stdout)
