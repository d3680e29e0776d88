"""Freed memory is kept while there is room, within its bound, and left alone where somebody else has arranged it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from phalanx import _core
from phalanx.host.block_pool import MemoryPolicy, choose
from tests.limited import run_limited

LIMIT_S = 60
MIB = 1 << 20
UNIT = 64 << 10

# ---------------------------------------------------------------- the pool


@pytest.fixture
def pool():
    return _core.Blocks(1 << 30, False)


def touch(address, size):
    import ctypes

    ctypes.memset(address, 1, size)


def test_a_freed_block_is_given_out_again_with_its_pages(pool):
    first = pool.take(8 * MIB)
    touch(first, 8 * MIB)
    pool.put(first)
    assert pool.growth(8 * MIB) == 0
    assert 8 * MIB <= pool.kept == pool.resident < 9 * MIB


def test_neighbours_that_are_free_become_one(pool):
    blocks = [pool.take(4 * MIB) for _ in range(4)]
    for number in (1, 3, 0, 2):
        pool.put(blocks[number])
    assert pool.growth(16 * MIB) == 0


def test_no_order_of_sizes_makes_more_resident_than_the_bound(pool):
    numbers = random.Random(0)
    taken, most_used = [], 0
    for _ in range(3000):
        if taken and numbers.random() < 0.5:
            pool.put(taken.pop(numbers.randrange(len(taken))))
        else:
            taken.append(pool.take(numbers.randrange(1, 160) * UNIT))
        most_used = max(most_used, pool.resident - pool.kept)
        assert pool.resident <= most_used * 9 / 8 + UNIT


def test_what_two_windows_have_not_needed_is_given_back(pool):
    training, evaluation = pool.take(10 * MIB), pool.take(200 * MIB)
    pool.put(evaluation)
    pool.next_window()
    assert pool.kept >= 200 * MIB
    pool.next_window()
    assert pool.kept <= 10 * MIB / 8 + UNIT
    pool.put(training)


def test_a_full_range_has_no_block(pool):
    assert pool.take(2 << 30) == 0
    assert pool.take(MIB) != 0


# ---------------------------------------------------------------- the choice


@pytest.fixture
def lay_out(tmp_path):
    """``lay_out(huge_pages, available_mib, limit_mib)``: return the root of such a machine."""

    def write(mode="always [madvise] never", available_mib=8000, limit_mib=0):
        files = {
            "sys/kernel/mm/transparent_hugepage/enabled": mode,
            "proc/meminfo": f"MemTotal: {16000 * 1024} kB\nMemAvailable: {available_mib * 1024} kB\n",
            "proc/self/cgroup": "0::/job\n",
            "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        }
        if limit_mib:
            files["sys/fs/cgroup/job/memory.max"] = str(limit_mib * MIB)
            files["sys/fs/cgroup/job/memory.current"] = str(100 * MIB)
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return str(tmp_path)

    return write


def test_memory_is_kept_in_huge_pages_where_nothing_speaks_against_it(lay_out):
    policy = choose({}, root=lay_out())
    assert policy == MemoryPolicy(keeps=True, huge_pages=True)
    assert str(policy) == "kept, huge pages"


def test_without_huge_pages_memory_is_kept_and_the_reason_said(lay_out):
    assert str(choose({}, root=lay_out(mode="always madvise [never]"))) == "kept (huge pages are off)"


@pytest.mark.parametrize("name", ["GLIBC_TUNABLES", "MALLOC_ARENA_MAX", "MALLOC_CONF", "THP_MEM_ALLOC_ENABLE"])
def test_what_the_user_has_arranged_is_left_alone(lay_out, name):
    assert str(choose({name: "1"}, root=lay_out())) == f"not kept ({name} is set)"


def test_default_is_what_the_user_may_ask_for(lay_out):
    assert str(choose({}, wanted="default", root=lay_out())) == "not kept (--memory default)"


def test_a_limit_too_small_for_all_ranks_is_said(lay_out):
    root = lay_out(limit_mib=3000)
    assert choose({}, num_ranks=2, root=root).keeps
    assert str(choose({}, num_ranks=4, root=root)) == "not kept (725 MiB left for each rank)"
    assert not choose({}, root=lay_out(available_mib=500)).keeps


@pytest.mark.parametrize(
    "name",
    [
        "proc/meminfo",
        "proc/self/cgroup",
        "sys/fs/cgroup/job/memory.max",
        "sys/fs/cgroup/job/memory.current",
        "sys/fs/cgroup/job/memory.stat",
    ],
)
def test_nothing_is_kept_where_nobody_can_tell_what_is_left(lay_out, name):
    root = lay_out(limit_mib=3000)
    assert choose({}, root=root).keeps
    path = Path(root, name)
    path.unlink(missing_ok=True)
    path.mkdir()  # root may read any file, but no folder as one
    policy = choose({}, root=root)
    assert str(policy) == f"not kept ({path} can't be read)"
    assert policy.todo


def test_nothing_is_kept_without_proc(tmp_path):
    assert str(choose({}, root=str(tmp_path))) == "not kept (no /proc/meminfo tells what is left)"


def test_another_c_library_is_left_alone(lay_out, monkeypatch):
    monkeypatch.setattr("phalanx.host.block_pool.ctypes.CDLL", lambda _: object())
    assert str(choose({}, root=lay_out())) == "not kept (a C library other than glibc is left alone)"


# ---------------------------------------------------------------- processes

# Prints what holds, and the page faults of a block of 64 MiB that is had again and again.
PROBE = """
import json, os, resource, torch
from phalanx.host.block_pool import in_force
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def again():
    before = faults()
    torch.empty(16 << 20).fill_(1)
    return faults() - before
again()
print("PROBE " + json.dumps([str(in_force()), min(again() for _ in range(3))]))
"""


def probe(command, source=PROBE, **environ):
    """Return the ended command, and what each of its processes has printed."""
    unwanted = ("PHALANX_MEMORY", "GLIBC_TUNABLES")
    inherited = {name: value for name, value in os.environ.items() if name not in unwanted}
    with contextlib.suppress(FileNotFoundError):
        Path("probe.py").write_text(textwrap.dedent(source))
    done = subprocess.run(
        [*command, "probe.py"], env={**inherited, **environ}, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    return done, [json.loads(line.split("PROBE ", 1)[1]) for line in done.stdout.splitlines() if "PROBE " in line]


RUN = (sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2")
KEPT = str(choose({}))


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("flags", "num_ranks"),
    [((), 2), (("--no-preload", "--nproc-per-node", "1"), 1)],  # executed ones import torch for themselves
    ids=["forked", "executed"],
)
def test_ranks_of_phalanx_run_keep_their_memory_without_a_word(flags, num_ranks):
    done, found = probe([*RUN, *flags])
    assert [policy for policy, _ in found] == [KEPT] * num_ranks
    assert all(faults < 20 for _, faults in found)
    assert "memory" not in done.stderr


@pytest.mark.slow
def test_ranks_free_as_before_if_asked_to():
    for flags, environ in ((("--memory", "default"), {}), ((), {"PHALANX_MEMORY": "default"})):
        done, found = probe([*RUN, *flags], **environ)
        assert [policy for policy, _ in found] == ["not kept (--memory default)"] * 2
        assert all(faults > 20 for _, faults in found)
        assert "phalanx run: 2 ranks x 1 thread; memory not kept (--memory default)" in done.stderr


@pytest.mark.slow
def test_a_launch_within_a_rank_chooses_for_itself():
    source = f"""
    import os, subprocess, sys
    if os.environ["RANK"] == "0":
        open("inner.py", "w").write({PROBE!r})
        command = [*{RUN!r}, "--memory", "default", "inner.py"]
        print(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    """
    assert [policy for policy, _ in probe(RUN, source)[1]] == ["not kept (--memory default)"] * 2


@pytest.mark.slow
def test_plain_python_is_left_alone_until_it_asks():
    assert probe([sys.executable])[1][0][0] == "not kept"
    asked = f"import phalanx\nassert phalanx.tune_process() == phalanx.tune_process()\n{PROBE}"
    [[policy, faults]] = probe([sys.executable], asked)[1]
    assert policy == KEPT
    assert faults < 20


def build_allocator(folder):
    """Return a library that replaces glibc's malloc, or skip."""
    source, library = folder / "other.c", folder / "libother_alloc.so"
    source.write_text(
        "extern void *__libc_malloc(unsigned long);\nvoid *malloc(unsigned long n) { return __libc_malloc(n); }\n"
    )
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    except FileNotFoundError:
        pytest.skip("needs a C compiler")
    return library


@pytest.mark.slow
def test_another_allocator_is_left_alone_and_named(tmp_path):
    library = build_allocator(tmp_path)
    done, found = probe(RUN, LD_PRELOAD=str(library))
    assert [policy for policy, _ in found] == ["not kept (libother_alloc.so is left alone)"] * 2
    assert " memory not kept (libother_alloc.so is left alone)\n" in done.stderr


def test_an_allocator_that_only_the_rank_has_is_left_alone(tmp_path):
    library = build_allocator(tmp_path)
    one = ["--nproc-per-node", "1"]  # rank, which imports torch for itself
    _, found = probe([*RUN, *one, "--no-python", "env", f"LD_PRELOAD={library}", sys.executable])
    assert [policy for policy, _ in found] == ["not kept (libother_alloc.so is left alone)"]


def of_this_rank(rank, world_size):
    from phalanx.host.block_pool import in_force

    return str(in_force())


def test_ranks_of_run_ranks_keep_their_memory(run_ranks, monkeypatch):
    assert run_ranks(of_this_rank, 2, backend=None) == [KEPT] * 2
    monkeypatch.setenv("PHALANX_MEMORY", "default")
    assert run_ranks(of_this_rank, 1, backend=None) == ["not kept (--memory default)"]


@pytest.mark.slow
def test_a_forked_child_keeps_its_memory_and_has_a_watch_of_its_own():
    source = f"""
    import os, sys, torch, phalanx
    phalanx.tune_process()
    held = torch.ones(8 << 20)
    pid = os.fork()
    def threads():
        names = [open(f"/proc/self/task/{{task}}/comm").read() for task in os.listdir("/proc/self/task")]
        return names.count("rank-memory\\n")
    if pid == 0:
        assert threads() == 0
        del held
        exec({PROBE!r})
        assert threads() == 1
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert threads() == 1
    assert held.sum() == 8 << 20
    """
    [[_, faults]] = probe([sys.executable], source, OMP_NUM_THREADS="1")[1]  # its threads do not survive a fork
    assert faults < 20


@pytest.mark.slow
def test_tensors_keep_their_values_whatever_is_allocated_between_them():
    source = """
    import random, torch, phalanx
    phalanx.tune_process()
    numbers, held = random.Random(0), {}
    for step in range(2000):
        held[numbers.randrange(40)] = (step, torch.full((numbers.randrange(1, 3 << 20),), step, dtype=torch.int32))
        for value, tensor in held.values():
            assert tensor[0] == tensor[-1] == value
    assert all((tensor == value).all() for value, tensor in held.values())
    """
    probe([sys.executable], source)


# ---------------------------------------------------------------- a limit of memory


# Rank 1 keeps what it has freed, and sleeps; then rank 0 needs most of the limit. Alone with glibc both would live.
NEIGHBOURS = """
import os, sys, time, torch
from phalanx.host.block_pool import in_force
rank = int(os.environ["RANK"])
if rank == 1:
    blocks = [torch.ones(16 << 20) for _ in range(20)]  # 1280 MiB
    print("HELD", in_force(), flush=True)
    del blocks
    open("freed", "w").close()
    while not os.path.exists("done"):
        time.sleep(0.05)
else:
    while not os.path.exists("freed"):
        time.sleep(0.02)
    blocks = []
    for _ in range(20):
        blocks.append(torch.ones(16 << 20))
    open("done", "w").close()
print("LIVED", rank, in_force(), flush=True)
"""


@pytest.mark.slow
def test_no_rank_is_killed_for_what_another_keeps(tmp_path):
    (tmp_path / "neighbours.py").write_text(NEIGHBOURS)
    done = run_limited([*RUN, "neighbours.py"], 2600 * MIB, tmp_path, LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"HELD {KEPT}" in done.stdout
    assert done.stdout.count("LIVED") == 2
    assert "MiB were left)" in done.stdout


# Keeps 512 MiB that it has freed, under a limit of version 2 whose files say what the test wants.
UNDER_A_LIMIT = """
import json, os, sys, time, torch
from phalanx import _core
def tell(used_mib, cache_mib):
    texts = {"memory.stat": f"anon 1\\ninactive_file {cache_mib << 20}\\n", "memory.current": f"{used_mib << 20}\\n"}
    for name, text in texts.items():
        with open(name + ".new", "w") as file:
            file.write(text)
        os.rename(name + ".new", name)
tell(1000, 0)
assert _core.start_block_pool(1 << 36, False, [(4000 << 20, "memory.current", "memory.stat", "inactive_file")])
block = torch.ones(128 << 20)
del block
keeps, _, _, unused = _core.block_pool()
assert keeps and unused == 512 << 20
HAPPENS
deadline = time.monotonic() + 2
while _core.block_pool()[0] and time.monotonic() < deadline:
    time.sleep(0.02)
print("PROBE " + json.dumps([_core.block_pool()[1], _core.block_pool()[3] >> 20]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("happens", "why", "kept_mib"),
    [
        ("tell(3700, 0)", "300 MiB of 4000 MiB were left", 0),
        ("tell(3900, 1500)", "", 512),
        ("os.unlink('memory.current')", "memory.current can't be read", 0),
    ],
    ids=["near", "cache", "gone"],
)
def test_what_a_cgroup_of_version_2_says_is_obeyed(happens, why, kept_mib):
    assert probe([sys.executable], UNDER_A_LIMIT.replace("HAPPENS", happens))[1] == [[why, kept_mib]]
