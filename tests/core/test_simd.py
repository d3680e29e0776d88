"""The core uses the widest vectors that this processor has, whichever compiler it was built with."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from phalanx import _core

V3 = {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}  # abm: with LZCNT
V4 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="of x86-64 alone there are several levels")
def test_the_kernels_are_those_of_the_processor():
    (flags, *_) = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")]
    has = set(flags.split())
    level = "x86-64-v4" if has >= V3 | V4 else "x86-64-v3" if has >= V3 else "baseline"
    assert _core.simd_level() == level
