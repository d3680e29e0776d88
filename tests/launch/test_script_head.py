"""What a script sets in its environment above ``import torch`` has the effect that it has without preloading."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.launch.script_head import Head, read_head
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


EXAMPLES = Path(__file__).parents[2] / "examples"
ANYTHING = "unknown variables"


def head_of(folder, source):
    (folder / "train.py").write_text(source)
    return read_head((sys.executable, str(folder / "train.py")), {})


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
    code = b"cbuiltins\nexec\n(S\"import os; os.environ['TORCH_LOGS'] = 'distributed'\"\ntR."  # as pickle writes it
    source = f"import pickle\npickle.loads({code!r})\nimport torch\n"
    job = run_job(tmp_path, source, num_ranks=1)
    assert job.returncode == 0, job.stderr
    assert "TORCH_LOGS has changed since torch was imported ahead of the script" in job.stderr


def test_a_script_that_executes_other_code_first_has_each_rank_import_torch(tmp_path):
    source = """
    exec("os.environ['TORCH_COMPILE_JOB_ID'] = 'unseen'")
    with open("/proc/self/maps") as maps:
        print("SEES", "libtorch" in maps.read())
    sys.exit()
    import torch
    """
    job = run_job(tmp_path, source, num_ranks=1)
    assert job.returncode == 0, job.stderr
    assert seen(job.stdout) == ["False"]
    assert "train.py may set unknown variables before it imports torch" in job.stderr


@pytest.mark.parametrize(("given", "at_head", "group"), [("", "gloo", "PhalanxGroup"), ("gloo", "", "ProcessGroup")])
def test_a_setting_of_phalanx_counts_above_import_torch(tmp_path, given, at_head, group):
    source = f"""
    os.environ["PHALANX_REPLACE"] = {at_head!r}
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    print("SEES", type(dist.group.WORLD).__name__)
    dist.destroy_process_group()
    """
    job = run_job(tmp_path, source, num_ranks=1, env={**os.environ, "PHALANX_REPLACE": given})
    assert job.returncode == 0, job.stderr
    assert seen(job.stdout) == [group]
    assert "imports it anew" not in job.stderr


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
        ("def main():\n    os.environ['TORCH_LOGS'] = 'a'\n    import torch\nmain()", {}, "TORCH_LOGS"),
        ("import own\nimport torch", {"TORCH_LOGS": "own"}, ""),
        ("import os as o\no.environ['TORCH_LOGS'] = 'a'\nimport torch", {"TORCH_LOGS": "a"}, ""),
        ("from os import environ as E\nE['TORCH_LOGS'] = 'a'\nimport torch", {"TORCH_LOGS": "a"}, ""),
        (
            "from own import put_into as E\nE['PYTORCH_JIT'] = 'a'\nimport torch",
            {"TORCH_LOGS": "own", "PYTORCH_JIT": "a"},
            "",
        ),
        ("from os import *\nenviron['TORCH_LOGS'] = 'a'\nimport torch", {"TORCH_LOGS": "a"}, ""),
        ("import os.path\nos.environ['TORCH_LOGS'] = 'a'\nimport torch", {"TORCH_LOGS": "a"}, ""),
        ("environ = {}\nenviron['OMP_NUM_THREADS'] = '7'\nimport torch", {}, "OMP_NUM_THREADS"),
        ("environ = {}\nenviron.update(TORCH_LOGS='a')\nimport torch", {}, "TORCH_LOGS"),
        ("environ = {}\nenviron.setdefault('TORCH_LOGS', 'a')\nimport torch", {}, "TORCH_LOGS"),
        ("environ = {}\nenviron['PORT'] = '7'\nimport torch", {}, ""),
        ("from os import environ\nenviron = {}\nenviron['TORCH_LOGS'] = 'a'\nimport torch", {}, "TORCH_LOGS"),
        ("import os.path as os\nos.environ['TORCH_LOGS'] = 'a'\nimport torch", {}, "TORCH_LOGS"),
        ("from os import environ\nclass environ: pass\nenviron['TORCH_LOGS'] = 'a'\nimport torch", {}, "TORCH_LOGS"),
        ("import own as os\nos.environ['PYTORCH_JIT'] = 'a'\nimport torch", {"TORCH_LOGS": "own"}, "PYTORCH_JIT"),
        ("if x:\n    from os import environ\nenviron['TORCH_LOGS'] = 'a'\nimport torch", {}, "TORCH_LOGS"),
        ("import os\nos.environ.setdefault('TORCH_LOGS', 'a')\nimport torch", {"TORCH_LOGS": "a"}, ""),
        (
            "import os\nos.environ.update({'TORCH_LOGS': 'a'}, PYTORCH_JIT='0')\nimport torch",
            {"TORCH_LOGS": "a", "PYTORCH_JIT": "0"},
            "",
        ),
        ("import os\ntry:\n    import torch\nexcept ImportError:\n    raise\nos.environ['TORCH_LOGS'] = 'a'", {}, ""),
        ("def f():\n    import with_torch\nimport os, with_torch\nos.environ['TORCH_LOGS'] = 'a'", {}, ""),
    ],
)
def test_the_head_of_a_script_is_read_in_the_order_in_which_it_runs(tmp_path, source, settings, doubt):
    (tmp_path / "own.py").write_text(
        "import os\nos.environ['TORCH_LOGS'] = 'own'\nfrom os import environ as put_into\n"
    )
    (tmp_path / "with_torch.py").write_text("import torch\n")
    head = head_of(tmp_path, source)
    assert (dict(head.settings), head.doubt) == (settings, doubt)


@pytest.mark.parametrize(
    ("line", "doubt"),
    [
        ("os.environ['TORCH_LOGS'], x = 'a', 1", "TORCH_LOGS"),
        ("os.environ['TORCH_LOGS']: str = 'a'", "TORCH_LOGS"),
        ("os.environ['TORCH_LOGS'] += 'a'", "TORCH_LOGS"),
        ("del os.environ['TORCH_LOGS']", "TORCH_LOGS"),
        ("os.environ.__setitem__('TORCH_LOGS', 'a')", "TORCH_LOGS"),
        ("os.putenv('TORCH_LOGS', 'a')", "TORCH_LOGS"),
        ("if os.environ.setdefault('TORCH_LOGS', 'a'): pass", "TORCH_LOGS"),
        ("while os.environ.pop('TORCH_LOGS', ''): pass", "TORCH_LOGS"),
        ("lambda: os.environ.update(TORCH_LOGS='a')", "TORCH_LOGS"),
        ("x and os.environ.update(TORCH_LOGS='a')", "TORCH_LOGS"),
        ("def f(x=os.environ.setdefault('TORCH_LOGS', 'a')): pass", "TORCH_LOGS"),
        ("for os.environ['TORCH_LOGS'] in 'ab': pass", "TORCH_LOGS"),
        ("os.environ.clear()", ANYTHING),
        ("os.environ |= {'TORCH_LOGS': 'a'}", ANYTHING),
        ("os.environ[name] = 'a'", ANYTHING),
        ("os.environ.update(**given)", ANYTHING),
        ("os.environ.update(json.loads(text))", ANYTHING),
        ("os.environb[b'TORCH_LOGS'] = b'a'", ANYTHING),
        ("from os import environb as E\nE[b'TORCH_LOGS'] = b'a'", ANYTHING),
        ("from os import putenv\nputenv('TORCH_LOGS', 'a')", ANYTHING),
        ("env = os.environ", ANYTHING),
        ("put = os.environ.update", ANYTHING),
        ("import own\nown.put_into['TORCH_LOGS'] = 'a'", ANYTHING),
        ("import own\nown.os.environ['TORCH_LOGS'] = 'a'", ANYTHING),
        ("env = os.environ if x else {}", ANYTHING),
        ("set_up(os.environ)", ANYTHING),
        ("getattr(os, 'environ')['TORCH_LOGS'] = 'a'", ANYTHING),
        ("sys.modules['os'].environ['TORCH_LOGS'] = 'a'", ANYTHING),
        ("def put(name, value): os.environ[name] = value", ANYTHING),
        ("exec(text)", ANYTHING),
        ("__import__('settings')", ANYTHING),
        ("import importlib\nimportlib.import_module('settings')", ANYTHING),
        ("from importlib import import_module as load\nload('settings')", ANYTHING),
        ("import runpy\nrunpy.run_path('settings.py')", ANYTHING),
        ("from unittest import mock\nmock.patch.dict(os.environ, {'TORCH_LOGS': 'a'}).start()", ANYTHING),
        ("from unittest import mock\nwith mock.patch.dict('os.environ', TORCH_LOGS='a'): pass", ANYTHING),
        ("from dotenv import load_dotenv\nload_dotenv()", ANYTHING),
        ("import third_party\nthird_party.set_up()", ANYTHING),
        ("from third_party import *", ANYTHING),
        ("sys.path.insert(0, 'src')\nimport in_src", ANYTHING),
    ],
)
def test_what_is_not_understood_for_certain_is_a_doubt(tmp_path, line, doubt):
    (tmp_path / "own.py").write_text("import os\nfrom os import environ as put_into\n")
    head = head_of(tmp_path, f"import json, os, sys\n{line}\nimport torch\n")
    assert (dict(head.settings), head.doubt) == ({}, doubt)


@pytest.mark.parametrize(
    "lines",
    [
        # As nanoGPT begins.
        "import os, time, math, pickle\nfrom contextlib import nullcontext\nimport numpy as np",
        "import argparse, logging\nlogging.basicConfig(level='INFO')\nlog = logging.getLogger(__name__)",
        "import warnings\nimport matplotlib\nwarnings.filterwarnings('ignore')\nmatplotlib.use('Agg')",
        "import random, numpy as np\nrandom.seed(0)\nnp.random.seed(0)",
        "import sys\nfrom pathlib import Path\nsys.path.insert(0, str(Path(__file__).parent))\nimport own, numpy",
        "import os\nrank = int(os.environ.get('RANK', 0))\nport = os.environ['PORT'] if 'PORT' in os.environ else ''",
        "import os\nos.makedirs('out', exist_ok=True)\nos.environ['CUDA_VISIBLE_DEVICES'] = str(rank)",
        "import importlib.util\nhas_apex = importlib.util.find_spec('apex') is not None",
        "try:\n    import third_party\nexcept ImportError:\n    third_party = None",
        "import yaml\nfrom tqdm import tqdm\nconfig = yaml.safe_load(open('config.yaml'))",
        "from own import helper\nhelper()",
    ],
)
def test_the_heads_of_most_scripts_are_understood(tmp_path, lines):
    (tmp_path / "own.py").write_text("import json\ndef helper():\n    return json.dumps({})\n")
    assert head_of(tmp_path, f"{lines}\nimport torch\nexec(text)\n") == Head()


def test_the_heads_of_the_examples_are_understood():
    paths = sorted(EXAMPLES.rglob("*.py"))
    assert paths
    assert {path.name: read_head((sys.executable, str(path)), {}) for path in paths} == {
        path.name: Head() for path in paths
    }
