"""``TORCH_DISTRIBUTED_USE_TORCHCOMMS=1``: torch hands torchcomms the backends that it has, and ours stay ours.

The registry has no torchcomms that works, so a package of that name stands in, which knows no backend or only a Gloo.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from phalanx._torch import version
from tests.ports import free_port

pytestmark = pytest.mark.skipif(version() < (2, 15), reason="older torch hands torchcomms whatever backend is named")

SCRIPT = """
import json, sys
import torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

dist.init_process_group(sys.argv[1])
rank, world = dist.get_rank(), dist.group.WORLD
def total(group=None):
    dist.all_reduce(tensor := torch.full((2,), rank + 1.0), group=group)
    return tensor.tolist()
seen = {"uses": c10d._use_torchcomms_enabled(), "group": type(world).__name__, "world": total()}
seen["new_group"] = total(dist.new_group())
part = dist.new_group([1])
seen["part"] = total(part) if rank == 1 else None
outputs = [torch.zeros(2), torch.zeros(2)] if rank == 0 else None
dist.gather(torch.full((2,), rank + 1.0), outputs, dst=0)
seen["gathered"] = outputs and [output.tolist() for output in outputs]
dist.monitored_barrier()
seen["split"] = total(dist.split_group(split_ranks=[[0, 1]]))
dist.destroy_process_group()
print(json.dumps({"rank": rank, **seen}), flush=True)
"""
STAND_IN = {
    "__init__.py": """
def is_backend_built(name): return name in {built}
def new_comm(name, *args, **named): raise RuntimeError(f"torchcomms was asked for {{name}}")
""",
    "_comms.py": """
class _BackendWrapper: pass
def new_comm(*args, **named): raise RuntimeError("torchcomms was asked")
def _is_backend_registered(name): return False
""",
    "hooks.py": "class FlightRecorderHook: pass\n",
}


@pytest.fixture
def torchcomms(tmp_path):
    """Write a torchcomms with these backends; return the environment in which torch uses it."""

    def write(*built):
        folder = tmp_path / "packages" / "torchcomms"
        folder.mkdir(parents=True)
        for name, text in STAND_IN.items():
            (folder / name).write_text(text.format(built=built) if name == "__init__.py" else text)
        return {"PYTHONPATH": str(folder.parent), "TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1"}

    return write


def run(tmp_path, backend, environ):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2", script, backend]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": free_port(), **environ}
    return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100)


def seen_in(done):
    assert done.returncode == 0, done.stderr
    found = [json.loads(line[line.index("{") :]) for line in done.stdout.splitlines() if '"rank"' in line]
    return sorted(found, key=lambda seen: seen["rank"])


@pytest.mark.parametrize("backend", ["phalanx", "cpu:phalanx"])
def test_our_names_go_on_where_torch_uses_torchcomms(torchcomms, tmp_path, backend):
    first, second = seen_in(run(tmp_path, backend, torchcomms("gloo", "nccl")))
    for seen in (first, second):
        assert (seen["uses"], seen["group"], seen["world"]) == (True, "PhalanxGroup", [3.0, 3.0])
        assert seen["new_group"] == seen["split"] == [3.0, 3.0]
    assert first["gathered"] == [[1.0, 1.0], [2.0, 2.0]]
    assert second["part"] == [2.0, 2.0]


def test_the_variable_changes_nothing_where_there_is_no_torchcomms(tmp_path):
    first, _ = seen_in(run(tmp_path, "phalanx", {"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1"}))
    assert (first["uses"], first["group"]) == (False, "PhalanxGroup")


def test_who_wants_gloo_replaced_is_told_that_torchcomms_is_asked_first(torchcomms, tmp_path):
    done = run(tmp_path, "gloo", {"PHALANX_REPLACE": "gloo", **torchcomms()})
    assert [seen["group"] for seen in seen_in(done)] == ["PhalanxGroup"] * 2
    assert "phalanx: PHALANX_REPLACE: torchcomms makes the groups that ask for Gloo, if it has a Gloo" in done.stderr
