"""A process that forks often lies in huge pages, and what it holds stays as it was."""

import json
import platform
import subprocess
import sys

import pytest

from phalanx import _memory
from phalanx.launch import pages

FORKS = """
import json, os, sys
from phalanx.launch.pages import fork_cheaply

def huge_kib():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("AnonHugePages:"))

def fork(of=lambda: None):
    if not (pid := os.fork()):
        of()
        os._exit(0 if held == expected else 1)
    assert os.waitpid(pid, 0)[1] == 0

def own_forks():
    fork_cheaply()
    before = huge_kib()
    for _ in range(15):
        fork()
    assert huge_kib() <= before  # they are counted anew; what it writes to it has in small pages

expected = [str(number) * 10 for number in range(400_000)]
held = [str(number) * 10 for number in range(400_000)]
fork_cheaply()
fork_cheaply()
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
    return version >= (6, 1) and _memory.offers_huge_pages()


def test_the_sixteenth_fork_finds_huge_pages_where_the_kernel_has_them():
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    first, fifteenth, sixteenth = json.loads(done.stdout)
    assert first == fifteenth
    if can_collapse():
        assert sixteenth > first + 10_000  # of the 60 MB that it holds
    else:
        assert sixteenth == first


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
