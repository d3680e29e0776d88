"""tools/coverage_cpp.py: what it counts, on a program of a few lines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PROGRAM = """
#include <csignal>
#include <unistd.h>
template <class T> int twice(T value) {
  if (value > T(1)) return 1;
  return 0;
}
int run(bool is_killed) {
  if (!is_killed) return twice(2.0);
  if (!twice(2))
    return 2;
  return raise(SIGKILL);
}
int main(int num_args, char**) {
  if (num_args > 1)
    _exit(1);
  const pid_t child = fork();
  _exit(run(child == 0));
}
"""

pytestmark = pytest.mark.skipif(not (REPO / "tools").is_dir(), reason="needs the source tree")


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(REPO / "tools")
    import coverage_cpp

    yield coverage_cpp
    del sys.modules["coverage_cpp"]


def test_lines_count_that_a_killed_fork_and_a_process_without_exit_have_executed(tool, tmp_path):
    clang = tool.find_clang()
    if clang is None:
        pytest.skip("needs clang++ of version 18 or later (Debian: clang-19 llvm-19 libclang-rt-19-dev)")
    source, binary, counters = tmp_path / "src" / "main.cpp", tmp_path / "main", tmp_path / "counters"
    source.parent.mkdir()
    counters.mkdir()
    source.write_text(PROGRAM.lstrip("\n"))
    subprocess.run([clang, "-O3", *tool.flags(counters).split(), "-o", binary, source], check=True, timeout=100)
    for arguments in ((), ("again",)):  # a process adds to what those before it have counted
        subprocess.run([binary, *arguments], check=False, timeout=100)
    file = tool.read(clang, binary, counters, source.parent)["src/main.cpp"]
    text = source.read_text().splitlines()
    assert [text[line - 1].strip() for line in file.missed()] == ["return 0;", "return 2;"]
    assert file.numbers()[2:] == (8, 6)  # two of the four conditions had one outcome


def test_neighbouring_lines_are_shown_as_one_range(tool):
    assert list(tool.ranges([3, 7, 8, 9, 11])) == ["3", "7-9", "11"]
