"""Which limits of memory and which kills hold for this process, on machines laid out in a folder."""

from __future__ import annotations

import os

import pytest

from phalanx.host import cgroups
from phalanx.host.cgroups import Memory

V2 = "30 23 0:26 {top} {point} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "35 31 0:32 {top} {point} rw,relatime - cgroup cgroup rw,memory\n"
NO_LIMIT = 9223372036854771712


def of_v2(limit, used, cache=0):
    return {"memory.max": limit, "memory.current": used, "memory.stat": f"anon 5\ninactive_file {cache}\n"}


def of_v1(limit, used, cache=0, tree=NO_LIMIT):
    stat = f"inactive_file 1\nhierarchical_memory_limit {tree}\ntotal_inactive_file {cache}\n"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}


@pytest.fixture
def lay_out(tmp_path):
    """``lay_out(cgroup, mountinfo, {folder: {file: content}})``: return the root of such a machine."""

    def write(cgroup, mountinfo, folders):
        proc = {"cgroup": cgroup, "mountinfo": mountinfo}
        for folder, files in {"proc/self": proc, **folders}.items():
            os.makedirs(tmp_path / folder, exist_ok=True)
            for name, content in files.items():
                (tmp_path / folder / name).write_text(str(content))
        return str(tmp_path)

    return write


def test_every_limit_on_the_way_up_counts(lay_out):
    mounts = V2.format(top="/", point="/sys/fs/cgroup")
    a, b = "sys/fs/cgroup/a", "sys/fs/cgroup/a/b"
    other = {"sys/fs/cgroup/a/other": of_v2(1, 1)}
    root = lay_out("0::/a/b\n", mounts, {a: of_v2(500, 400, 100), b: of_v2("max", 50), **other})
    assert cgroups.cgroup_memory(root) == [Memory(500, 300)]
    assert cgroups.cgroup_memory(root)[0].left_bytes == 200


def test_a_limit_at_which_processes_are_stopped_counts_like_one_at_which_they_are_killed(lay_out):
    mounts = V2.format(top="/", point="/sys/fs/cgroup")
    root = lay_out("0::/a\n", mounts, {"sys/fs/cgroup/a": {**of_v2(500, 100), "memory.high": 300}})
    assert cgroups.cgroup_memory(root) == [Memory(300, 100)]


def test_a_container_sees_the_branch_that_is_mounted(lay_out):
    mounts = V1.format(top="/docker/0a", point="/sys/fs/cgroup/memory")
    folders = {"sys/fs/cgroup/memory": of_v1(900, 10), "sys/fs/cgroup/memory/job": of_v1(NO_LIMIT, 5)}
    root = lay_out("9:cpu:/x\n4:memory:/docker/0a/job\n0::/\n", mounts, folders)
    assert cgroups.cgroup_memory(root) == [Memory(900, 10)]


def test_a_limit_of_version_1_above_what_is_mounted_counts(lay_out):
    mounts = V1.format(top="/pod/c", point="/sys/fs/cgroup/memory")
    root = lay_out("4:memory:/pod/c\n", mounts, {"sys/fs/cgroup/memory": of_v1(NO_LIMIT, 30, 10, tree=700)})
    assert cgroups.cgroup_memory(root) == [Memory(700, 20)]


def test_both_versions_may_be_mounted_at_places_of_their_own(lay_out):
    mounts = V1.format(top="/", point=r"/my\040cgroups/memory") + V2.format(top="/", point="/sys/fs/cgroup/unified")
    folders = {"my cgroups/memory/j": of_v1(80, 10), "sys/fs/cgroup/unified/j": {"cgroup.procs": ""}}
    root = lay_out("4:memory:/j\n0::/j\n", mounts, folders)
    assert cgroups.cgroup_memory(root) == [Memory(80, 10)]


@pytest.mark.parametrize("path", ["/../elsewhere", "/../../elsewhere/a", "/not/mounted/here"])
def test_a_path_outside_of_what_is_mounted_leaves_the_mount_itself(lay_out, path):
    mounts = V2.format(top="/", point="/sys/fs/cgroup")
    root = lay_out(f"0::{path}\n", mounts, {"sys/fs/cgroup": of_v2(70, 1), "sys/fs/elsewhere": of_v2(1, 1)})
    assert cgroups.cgroup_memory(root) == [Memory(70, 1)]


def test_kills_are_counted_by_our_own_cgroup_or_by_the_host(lay_out):
    mounts = V2.format(top="/", point="/sys/fs/cgroup")
    folders = {
        "proc": {"vmstat": "pgfault 5\noom_kill 9\n"},
        "sys/fs/cgroup/a": {"memory.events": "oom 4\noom_kill 3\n"},
    }
    assert cgroups.count_oom_kills(lay_out("0::/a\n", mounts, folders)) == 3


def test_kills_are_counted_by_version_1_too(lay_out):
    mounts = V1.format(top="/", point="/sys/fs/cgroup/memory")
    files = {"memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"}
    assert cgroups.count_oom_kills(lay_out("4:memory:/\n", mounts, {"sys/fs/cgroup/memory": files})) == 2


def test_without_cgroups_the_host_counts(lay_out):
    files = {"vmstat": "oom_kill 9\n", "meminfo": "MemTotal: 8 kB\nMemAvailable: 2 kB\n"}
    root = lay_out("", "", {"proc": files})
    assert (cgroups.count_oom_kills(root), cgroups.cgroup_memory(root)) == (9, [])
    assert cgroups.host_memory(root) == Memory(8192, 6144)
