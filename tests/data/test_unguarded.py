"""A script without ``if __name__ == "__main__":``, which a spawned worker runs once more."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys, phalanx, torch.distributed as dist
phalanx.init() if sys.argv[1] == "init" else dist.init_process_group(sys.argv[1])
for batch in phalanx.DataLoader(range(8), 2, num_workers=1, multiprocessing_context="spawn"):
    print(batch)
"""


@pytest.mark.parametrize(("how", "call"), [("init", "phalanx.init"), ("phalanx", "init_process_group")])
def test_a_worker_that_imports_the_script_again_is_told_so(tmp_path, how, call):
    script = tmp_path / "unguarded.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2", str(script), how]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert ended.returncode != 0
    assert f"RuntimeError: {call}: this process is no rank: it is SpawnProcess-1, which a rank" in ended.stderr
    assert 'Put what trains under if __name__ == "__main__": in the script.' in ended.stderr
    assert "claim rank" not in ended.stderr
