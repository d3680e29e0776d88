"""Files that no save has written are loaded, skipped for an older checkpoint, or raise a CheckpointError.

10,000 inputs to each parser with PHALANX_TEST_LONG=1 (`make stress`).
"""

from __future__ import annotations

import os

import pytest

from phalanx.checkpoint.memory import snapshots
from tests.checkpoint import _fuzz

NUM_INPUTS = 10_000 if os.environ.get("PHALANX_TEST_LONG") == "1" else 100


@pytest.mark.parametrize("parser", _fuzz.PARSERS, ids=lambda parser: parser.__name__)
def test_no_input_crashes_a_parser(tmp_path, monkeypatch, parser):
    fd = os.memfd_create("snapshots-of-a-test")
    monkeypatch.setattr(snapshots, "_memory", None)
    monkeypatch.setenv("PHALANX_SNAPSHOTS", f"/proc/{os.getpid()}/fd/{fd}")
    try:
        _fuzz.attack(parser, tmp_path, NUM_INPUTS)
    finally:
        snapshots.memory().close()  # opened by a load
        os.close(fd)
