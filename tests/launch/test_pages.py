"""A process that forks often lies in huge pages, and what it holds stays as it was."""

import json
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

from phalanx.host import block_pool
from phalanx.host.cgroups import Memory
from phalanx.launch.processes import pages
from phalanx.launch.processes.pages import fork_cheaply

FORKS = """
import json, os, sys
from phalanx.launch.processes.pages import fork_cheaply

def huge_kib():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("AnonHugePages:"))

def fork(of=lambda: None):
    fork_cheaply(1)
    if not (pid := os.fork()):
        of()
        os._exit(0 if held == expected else 1)
    assert os.waitpid(pid, 0)[1] == 0

def own_forks():
    before = huge_kib()
    for _ in range(15):
        fork()
    assert huge_kib() <= before  # they are counted anew; what it writes to it has in small pages

expected = [str(number) * 10 for number in range(400_000)]
held = [str(number) * 10 for number in range(400_000)]
said = [huge_kib()]
for _ in range(15):
    fork()
said.append(huge_kib())
fork(own_forks)
said.append(huge_kib())
assert held == expected
print(json.dumps(said))
"""


def can_collapse():
    version = tuple(int(part) for part in platform.release().split(".")[:2])
    return version >= (6, 1) and block_pool.offers_huge_pages()


def test_the_sixteenth_fork_finds_huge_pages_where_the_kernel_has_them():
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    first, fifteenth, sixteenth = json.loads(done.stdout)
    assert first == fifteenth
    if can_collapse():
        assert sixteenth > first + 10_000  # of the 60 MB that it holds
    else:
        assert sixteenth == first


@pytest.fixture
def advised(monkeypatch):
    """The pieces of 100 MB, of which 20 are unused, that the kernel is asked to put together."""
    pieces = []

    def madvise(*piece):
        pieces.append(piece[:2])

    monkeypatch.setattr(pages.ctypes, "CDLL", lambda _: SimpleNamespace(madvise=madvise))
    monkeypatch.setattr(pages, "offers_huge_pages", lambda: True)
    monkeypatch.setattr(pages, "_own_memory", lambda: iter([(0, 100 << 20, 20 << 20)]))
    monkeypatch.setattr(pages, "_is_slow", False)
    return pieces


def test_it_is_done_at_the_sixteenth_fork_and_at_every_thirtysecond_after(advised, monkeypatch):
    monkeypatch.setattr(pages, "_forks", (0, 0))
    done_at = []
    for number in range(1, 50):
        fork_cheaply(2)
        if advised:
            done_at.append(2 * number)
            assert advised == [(0, 64 << 20), (64 << 20, 36 << 20)]
            advised.clear()
    assert done_at == [16, 48, 80]


@pytest.mark.parametrize(("room_mib", "num_pieces"), [(79, 0), (80, 2)])
def test_nothing_is_done_where_it_would_take_much_of_what_memory_is_left(advised, monkeypatch, room_mib, num_pieces):
    monkeypatch.setattr(pages, "known_memory", lambda: [Memory(1 << 40, 0), Memory(room_mib << 20, 0)])
    pages._collapse()
    assert len(advised) == num_pieces


def test_what_takes_long_is_left_and_not_done_again(advised, monkeypatch):
    monkeypatch.setattr(pages, "_LONG_S", 0.0)
    pages._collapse()
    pages._collapse()
    assert advised == [(0, 64 << 20)]


def test_nothing_is_done_where_huge_pages_are_off(monkeypatch):
    monkeypatch.setattr(pages, "offers_huge_pages", lambda: False)
    monkeypatch.setattr(pages, "_own_memory", lambda: pytest.fail("it looks"))
    pages._collapse()


def test_a_system_without_a_list_of_its_memory_is_none_to_complain_of(monkeypatch):
    def refuse():
        raise FileNotFoundError("/proc/self/smaps")

    monkeypatch.setattr(pages, "_own_memory", refuse)
    monkeypatch.setattr(pages, "offers_huge_pages", lambda: True)
    pages._collapse()
    assert not pages._is_slow
