"""Plants faults in the C++ core, one at a time, and checks whether the fuzzer or PHALANX_VERIFY finds each.

``faults.py core`` runs this. The core is built once in ``build/faults/core`` from a copy of the sources. A fault
changes one file of the copy, so only files that include this file are compiled again. ``tests/core/sanitized`` makes
Python load the built extension in place of the installed one. The repository's own sources never contain a fault.

The fuzzer has found a fault if it exits with 1; the time shown runs from its first program and does not include the
start of the ranks. PHALANX_VERIFY has found a fault if a test of the backend, run with every call verified, raises
`phalanx.WrongResult`; a test that fails in another way, by its own assertion or a hang, does not count.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import nanobind

REPOSITORY = Path(__file__).resolve().parents[1]
KEPT = REPOSITORY / "build" / "faults" / "core"
_BUILD_S = 900.0
_RUN_S = 300.0  # time limit for a run of the fuzzer, including its start, or of a test file
_LATE = -1  # stands for the exit code of a run that passed its time limit
_VERIFIED = ("test_collectives", "test_messages", "test_uneven_lists", "test_shapes", "test_dtypes", "test_works")
"""Files of tests/backend that reach the faults; the files that find most faults soonest come first."""


@dataclass(frozen=True)
class CoreFault:
    """A change of one place in the core.

    Attributes:
        name: What goes wrong because of the change.
        path: File below ``csrc``.
        before: Text that occurs exactly once in the file.
        after: Text that replaces `before`.
    """

    name: str
    path: str
    before: str
    after: str


FAULTS = (
    CoreFault(
        "all_reduce of three and more: the last rank's share of a chunk lacks its last element",
        "collectives/all_reduce.cpp",
        "return {first, std::min(share, m - first)};",
        "return {first, std::min(share, m - first) - (r + 1 == size_ && m > first ? 1 : 0)};",
    ),
    CoreFault(
        "all_reduce: shares are collected before they are reduced",
        "collectives/all_reduce.cpp",
        "group_.await_all(wait, &Progress::consumed, base_ + c);",
        "group_.await_all(wait, &Progress::consumed, base_ + c - 1);",
    ),
    CoreFault(
        "chunks: the last chunk is staged without its last element",
        "collectives/exchange.h",
        "stage(slot(control_.rank(), (base + c) % kRing), c * most, length(c));",
        "stage(slot(control_.rank(), (base + c) % kRing), c * most,\n"
        "          length(c) - (c + 1 == num_chunks && num_chunks > 1 ? blocks.item_bytes : 0));",
    ),
    CoreFault(
        "chunks: a slot is staged again before its last readers are done",
        "collectives/exchange.h",
        "if (c >= kRing) await_all(",
        "if (false) await_all(",
    ),
    CoreFault(
        "blocks: the offset of rank 3's block is that of rank 1's",
        "collectives/exchange.h",
        "static_cast<std::size_t>(to < from ? to : to - 1);",
        "static_cast<std::size_t>(to < from ? to : to == 3 ? 1 : to - 1);",
    ),
    CoreFault(
        "stages: a rank that is one collective ahead overwrites what its peers still read",
        "collectives/arrival.cpp",
        "? control_.line(r, seq_).payload : control_.stage(r, seq_);",
        "? control_.line(r, seq_).payload : control_.stage(r, 0);",
    ),
    CoreFault(
        "lines: small data lies in the line of the collective before",
        "collectives/arrival.cpp",
        "? control_.line(r, seq_).payload : control_.stage(r, seq_);",
        "? control_.line(r, 0).payload : control_.stage(r, seq_);",
    ),
    CoreFault(
        "direct reads: a rank returns while its peers still read its memory",
        "collectives/move.cpp",
        "  await_all(wait, &Progress::consumed, chunks_);\n",
        "",
    ),
    CoreFault(
        "large moves: a rank's own block is not copied",
        "collectives/move.cpp",
        "collect_takes(area_of, blocks.num, lo, len); });\n  take_own();\n}",
        "collect_takes(area_of, blocks.num, lo, len); });\n}",
    ),
    CoreFault(
        "reduce: rank 0 counts as the root",
        "collectives/collectives.cpp",
        "sources_[r] = r == root ? at(in, lo) : area_of(r);",
        "sources_[r] = r == 0 ? at(in, lo) : area_of(r);",
    ),
    CoreFault(
        "reduce_scatter of uneven lists: as many chunks as rank 0's block needs",
        "collectives/collectives.cpp",
        "exchange_chunks(wait, Flow::kEverybody, {num_peers, largest(counts) * item, item}, stage, consume);",
        "exchange_chunks(wait, Flow::kEverybody, {num_peers, counts[0] * item, item}, stage, consume);",
    ),
    CoreFault(
        "all_to_all with splits: as many chunks as the largest block to a later rank needs",
        "collectives/arrival.cpp",
        "if (from != to) most = std::max(most, sent);",
        "if (from < to) most = std::max(most, sent);",
    ),
    CoreFault(
        "int16 is reduced as uint16",
        "collectives/reduce_kernels.cpp",
        "return integer<short>(op);",
        "return integer<u16>(op);",
    ),
    CoreFault(
        "float16: the last of an odd number of elements is not loaded",
        "collectives/reduce_kernels.cpp",
        "  for (; i < m; ++i) acc[i] = widen(src[i]);",
        "  for (; i + 1 < m; ++i) acc[i] = widen(src[i]);",
    ),
    CoreFault(
        "reductions of three and more: the last element of each full block of 1024 is not stored",
        "collectives/reduce_kernels.cpp",
        "  store_block(dst + at, acc, m, finish);",
        "  store_block(dst + at, acc, m - (m == kBlock ? 1 : 0), finish);",
    ),
    CoreFault(
        "MIN loses a NaN that comes first",
        "collectives/reduce_kernels.cpp",
        "return (a < b || a != a) ? a : b;",
        "return a < b ? a : b;",
    ),
    CoreFault(
        "AVG of complex numbers divides the real part alone",
        "collectives/reduce_kernels.cpp",
        "return {step(x.re), step(x.im)};",
        "return {step(x.re), x.im};",
    ),
    CoreFault(
        "misaligned tensors: each block of 1024 goes to the place of the first",
        "collectives/reduce.cpp",
        "std::memcpy(static_cast<std::byte*>(dst) + at * element.bytes, base, m * element.bytes);",
        "std::memcpy(static_cast<std::byte*>(dst), base, m * element.bytes);",
    ),
    CoreFault(
        "asynchronous calls: a blocking one overtakes those that wait",
        "collectives/worker.h",
        "if (idle() && turn_.try_take()) {",
        "if (turn_.try_take()) {",
    ),
    CoreFault(
        "messages: a fragment is announced before its data is there",
        "p2p/p2p_rings.cpp",
        "    const std::byte* from = request->data_ + request->moved_;\n",
        "    const std::byte* from = request->data_ + request->moved_;\n"
        "    record.number.store(out.num_sent + 1, std::memory_order_release);\n",
    ),
    CoreFault(
        "messages: the ring of records counts as full one record late",
        "p2p/p2p_rings.cpp",
        "out.num_sent - out.num_taken < Channel::kRecords",
        "out.num_sent - out.num_taken <= Channel::kRecords",
    ),
    CoreFault(
        "messages: the ring of bytes counts as twice as large",
        "p2p/p2p_rings.cpp",
        "end - out.bytes_taken <= kChannelBytes;",
        "end - out.bytes_taken <= 2 * kChannelBytes;",
    ),
    CoreFault(
        "messages: what wraps around the end of the ring is lost",
        "p2p/p2p_rings.cpp",
        "  if (bytes > first) std::memcpy(channel.ring, from + first, bytes - first);\n",
        "",
    ),
    CoreFault(
        "messages: of those that wait with one tag, the newest is received first",
        "p2p/p2p_rings.cpp",
        "message = found->second.front();\n  found->second.pop_front();",
        "message = found->second.back();\n  found->second.pop_back();",
    ),
)


class Core:
    """The copy of the sources, and its build."""

    def __init__(self) -> None:
        self._sources, self._build = KEPT / "sources", KEPT / "build"
        self._sources.mkdir(parents=True, exist_ok=True)
        for path in [REPOSITORY / "CMakeLists.txt", *REPOSITORY.glob("csrc/*/*")]:
            copy = self._sources / path.relative_to(REPOSITORY)
            if path.is_file() and (not copy.exists() or copy.read_bytes() != path.read_bytes()):
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)

    def build(self) -> Path:
        """Compile what has changed; return the path of the extension."""
        folder = Path(sys.executable).parent
        cmake = shutil.which("cmake", path=os.pathsep.join([str(folder), os.environ.get("PATH", "")]))
        assert cmake is not None, "cmake is missing; pip install -r requirements-dev.txt"
        if not (self._build / "build.ninja").exists():
            configure = [cmake, "-S", str(self._sources), "-B", str(self._build), "-G", "Ninja"]
            configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={nanobind.cmake_dir()}"]
            _call([*configure, "-DCMAKE_BUILD_TYPE=Release"])
        _call([cmake, "--build", str(self._build), "--target", "_core"])
        (core,) = self._build.glob("_core*.so")
        return core

    def plant(self, fault: CoreFault) -> None:
        """Put a fault into the copy."""
        text = (REPOSITORY / "csrc" / fault.path).read_text()
        assert text.count(fault.before) == 1, (
            f"{fault.name}: {fault.path} has its text {text.count(fault.before)} times"
        )
        (self._sources / "csrc" / fault.path).write_text(text.replace(fault.before, fault.after))

    def mend(self, fault: CoreFault) -> None:
        """Take a fault out of the copy."""
        (self._sources / "csrc" / fault.path).write_text((REPOSITORY / "csrc" / fault.path).read_text())


def _call(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_S, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@dataclass(frozen=True)
class Found:
    """How a fault was found.

    Attributes:
        after: Time until the fault was found, with its unit.
        by: Program or test that found the fault, as text.
    """

    after: str
    by: str


def fuzz(core: Path, seconds: float, seed: int) -> Found | None:
    """Run the fuzzer on a core; return how it found a fault, None if it found none in time."""
    command = [sys.executable, "-m", "phalanx.testing.fuzz", "--seconds", str(seconds), "--seed", str(seed)]
    code, output = _run([*command, "--out", str(KEPT), "--shrink", "0"], core)
    if code in (0, _LATE):
        return None
    assert code == 1, f"the fuzzer ended with {code}: {output[-2000:]}"
    after = re.search(r"a fault after ([\d.]+) s", output)
    by = re.search(r"^program \d+ of seed \d+, (.*)", output, re.MULTILINE)
    assert after is not None, output[-2000:]
    return Found(f"{float(after[1]):.1f} s", _brief(by[1]) if by else "")


def verify(core: Path) -> Found | None:
    """Run tests of the backend on a core with every call verified; return how a fault was found, None if it was not."""
    began_s = time.monotonic()
    for name in _VERIFIED:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "--maxfail=3"]
        _, output = _run([*command, f"tests/backend/{name}.py"], core, PHALANX_VERIFY="gloo")
        if wrong := re.search(r"WrongResult: (.*)", output):
            return Found(f"{time.monotonic() - began_s:.0f} s", f"{name}: {wrong[1][:80]}")
    return None


def _run(command: Sequence[str], core: Path, **environ: str) -> tuple[int, str]:
    """Run a command with `core` in place of the installed core; return the command's exit code and output."""
    path = str(REPOSITORY / "tests" / "core" / "sanitized")
    given = {**os.environ, "PYTHONPATH": path, "SANITIZED_CORE": str(core), **environ}
    with subprocess.Popen(
        command, env=given, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=_RUN_S)
        except subprocess.TimeoutExpired:
            process.kill()  # ranks end when the process that started them ends
            output, _ = process.communicate()
            return _LATE, output
    return process.returncode, output


def find(faults: Sequence[CoreFault], look: Callable[[Path], Found | None]) -> list[str]:
    """Plant each fault alone, look for it, and print a row of a table; return the names of faults not found."""
    core, missed = Core(), []
    found = look(core.build())
    assert found is None, f"without a fault, {found} was found"
    print("| Fault | Found after | By |\n|---|---|---|", flush=True)
    for fault in faults:
        core.plant(fault)
        try:
            found = look(core.build())
        finally:
            core.mend(fault)
        if found is None:
            missed.append(fault.name)
        print(f"| {fault.name} | {found.after if found else 'no'} | {found.by if found else ''} |", flush=True)
    print(f"{len(faults) - len(missed)} of {len(faults)} found")
    return missed


def _brief(words: str) -> str:
    step = re.search(r"step \d+[,:]? \(?(\w+)(?: of \S+ (\S+))?", words)
    what = "a wrong result" if "differ" in words else "an error" if "raised" in words else "a hang or a death"
    if "written beside" in words or "changed its input" in words:
        what = "memory that it must not touch"
    if "first round" in words:
        what = "two rounds that differ"
    return f"{what} of {step[1]}" if step else what
