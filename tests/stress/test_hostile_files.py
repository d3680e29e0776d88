"""Whatever stands in the files of a run, whoever reads them neither crashes nor hangs."""

from __future__ import annotations

import os

from tests.train import hostile

NUM_FILES = 10_000 if os.environ.get("PHALANX_TEST_LONG") else 300


def test_any_log_of_metrics_can_be_read():
    hostile.fuzz(NUM_FILES)
