"""Each fault that is planted in the core is found by the fuzzer, within a minute of fuzzing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def core_faults(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import core_faults

    yield core_faults
    del sys.modules["core_faults"]


def test_every_fault_has_its_place(core_faults):
    names = [fault.name for fault in core_faults.FAULTS]
    assert len(names) == len({*names}) >= 20
    for fault in core_faults.FAULTS:
        text = (core_faults.REPOSITORY / "csrc" / fault.path).read_text()
        assert text.count(fault.before) == 1, fault.name


@pytest.mark.slow
def test_the_fuzzer_finds_every_fault_of_the_core(core_faults):
    assert core_faults.find(core_faults.FAULTS, 60.0, 1) == []
