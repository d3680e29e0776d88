"""What a script sets in its environment above ``import torch`` has the effect that it has without preloading."""

from __future__ import annotations

import subprocess
import sys

import pytest

from phalanx.launch.script_head import read_head
from tests.launch.jobs import LIMIT_S, run_job, write_script

HEAD = """
hidden = not any(name in sys.modules for name in ("torch", "torch.nn", "numpy", "phalanx"))
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCH_LOGS"] = "+distributed"
os.environ.update(PYTORCH_JIT="0", TORCH_COMPILE_JOB_ID="mine")
os.environ.setdefault("TORCH_FAKE_TENSOR_DEBUG", "1")
import logging, torch, torch.distributed as dist
print("SEES", hidden, str(dist.get_debug_level()), torch.get_num_threads(), torch.jit._state._enabled.enabled,
      logging.getLogger("torch.distributed").level, torch.compiler.config.job_id,
      torch._subclasses.fake_tensor.FakeTensorConfig.debug)
"""


def seen(output):
    return [line.split("SEES ")[1] for line in output.splitlines() if "SEES " in line]


def test_every_rank_sees_what_plain_python_sees(tmp_path):
    job = run_job(tmp_path, HEAD)
    assert job.returncode == 0, job.stderr
    assert "imported ahead" not in job.stderr
    script = write_script(tmp_path, HEAD.replace("RANK", "0"), "plain.py")
    command = [sys.executable, "-c", f"import os; os.environ['RANK'] = '0'; exec(open({script!r}).read())"]
    plain = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert plain.returncode == 0, plain.stderr
    assert seen(job.stdout) == seen(plain.stdout) * 2


def test_a_value_that_only_the_script_knows_has_each_rank_import_torch(tmp_path):
    source = """
    os.environ["TORCH_COMPILE_JOB_ID"] = f"job-{RANK}"
    import torch
    print("SEES", torch.compiler.config.job_id)
    """
    job = run_job(tmp_path, source)
    assert job.returncode == 0, job.stderr
    assert sorted(seen(job.stdout)) == ["job-0", "job-1"]
    assert "train.py may set TORCH_COMPILE_JOB_ID before it imports torch" in job.stderr


def test_what_the_source_does_not_tell_is_said(tmp_path):
    job = run_job(tmp_path, "exec(\"os.environ['TORCH_LOGS'] = 'distributed'\")\nimport torch\n", num_ranks=1)
    assert job.returncode == 0, job.stderr
    assert "TORCH_LOGS has changed since torch was imported ahead of the script" in job.stderr


@pytest.mark.parametrize(
    ("source", "settings", "doubt"),
    [
        (
            "import os\nos.environ['TORCH_LOGS'] = 'a'\nos.environ['HF_HOME'] = 'b'\nimport torch",
            {"TORCH_LOGS": "a"},
            "",
        ),
        ("import os, torch\nos.environ['TORCH_LOGS'] = 'a'", {}, ""),
        ("import os\nif x:\n    os.environ['TORCH_LOGS'] = 'a'\nimport torch", {}, "TORCH_LOGS"),
        ("import os, third_party\nos.environ['TORCH_LOGS'] = 'a'\nimport torch", {}, "TORCH_LOGS"),
        ("import os\nos.environ.pop('TORCH_LOGS', None)\nimport torch", {}, "TORCH_LOGS"),
        ("import os\nos.environ.setdefault('OMP_NUM_THREADS', '4')\nimport torch", {}, ""),
        ("from dotenv import load_dotenv\nload_dotenv()\nimport torch", {}, "what is not known"),
        ("def main():\n    os.environ['TORCH_LOGS'] = 'a'\n    import torch\nmain()", {}, "TORCH_LOGS"),
        ("import own\nimport torch", {"TORCH_LOGS": "own"}, ""),
    ],
)
def test_the_head_of_a_script_is_read_in_the_order_in_which_it_runs(tmp_path, source, settings, doubt):
    (tmp_path / "own.py").write_text("import os\nos.environ['TORCH_LOGS'] = 'own'\n")
    (tmp_path / "train.py").write_text(source)
    head = read_head((sys.executable, str(tmp_path / "train.py")), {})
    assert (dict(head.settings), head.doubt) == (settings, doubt)
