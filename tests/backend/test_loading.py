"""How torch finds the backend: by its name, without an import, as the default; and that it cannot break torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import phalanx

ALONE = """
import torch.distributed as dist
import torch, sys
dist.init_process_group({backend}store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
print(dist.get_backend(), tensor.tolist(), type(dist.group.WORLD).__name__)
dist.destroy_process_group()
"""

# Stands for an installation that is broken: importing the named module raises.
SABOTAGE = """
import sys
class Saboteur:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise {error}
sys.meta_path.insert(0, Saboteur())
"""


def run_python(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `script` in a fresh interpreter, away from the repository."""
    return subprocess.run(
        [sys.executable, "-W", "always", "-c", script],
        capture_output=True,
        text=True,
        timeout=100,
        cwd="/",
        env={**os.environ, **env},
    )


@pytest.fixture
def run_forked(forked):
    """Run a script like `run_python`, but with torch imported: for what does not happen while it is."""

    def run(script: str) -> subprocess.CompletedProcess[str]:
        return forked.run("-c", f"import warnings\nwarnings.simplefilter('always')\n{script}")

    return run


def test_init_works_without_importing_phalanx_and_ends_silently():
    ended = run_python(ALONE.format(backend="'phalanx', "))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split("\n")[0] == "phalanx [1.0, 1.0, 1.0] PhalanxGroup"
    assert ended.stderr == ""


def test_importing_torch_imports_nothing_heavy_of_phalanx_and_what_a_rank_made_before_is_finalized():
    """Hiding torch's objects from the garbage collector would end a rank half a second sooner, and its data with it."""
    script = """
import os, sys
class Log:
    def __init__(self):
        self.circle = self
    def __del__(self, write=os.write):
        write(1, b"finalized\\n")
early = Log()
import torch.distributed
late = Log()
print(sorted(name for name in sys.modules if name.startswith('phalanx')), flush=True)
"""
    ended = run_python(script, RANK="0")
    imported, *finalized = ended.stdout.splitlines()
    light = ["phalanx", "phalanx._env", "phalanx._plugin", "phalanx._torch"]
    assert imported in ("[]", str(light))  # nothing if torch loads no plugins
    assert finalized == ["finalized"] * 2
    assert ended.stderr == ""


def test_install_as_default_takes_the_place_of_gloo(run_forked):
    lines = "import phalanx\nphalanx.install_as_default()\n" + ALONE.format(backend="")
    ended = run_forked(lines)
    assert ended.returncode == 0, ended.stderr
    assert "[1.0, 1.0, 1.0] PhalanxGroup" in ended.stdout
    assert ended.stderr == ""


def test_without_it_gloo_stays_the_default(run_forked):
    ended = run_forked(ALONE.format(backend=""))
    assert ended.returncode == 0, ended.stderr
    assert "PhalanxGroup" not in ended.stdout


def test_install_as_default_holds_for_groups_and_devices(run_forked):
    script = """
import phalanx, torch, torch.distributed as dist
phalanx.install_as_default()
phalanx.install_as_default()
dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
inner = dist.new_group([0])
work = dist.all_reduce(torch.ones(2), group=inner, async_op=True)
work.wait()
dist.destroy_process_group()
print(type(inner).__name__, type(work).__name__)
"""
    ended = run_forked(script)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "PhalanxGroup PhalanxWork"


def test_a_broken_plugin_cannot_break_torch():
    """The entry point's own module fails: torch imports, perhaps with a warning, and other backends work."""
    script = SABOTAGE.format(module="phalanx.backend.groups", error="errors[0]('broken')")
    script += """
errors = [ImportError, RuntimeError, SyntaxError]
import os
import torch.distributed as dist
for error in errors:
    if (child := os.fork()) == 0:
        errors[:] = [error]
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        print("gloo works", flush=True)
        dist.destroy_process_group()
        try:
            dist.init_process_group("phalanx", store=dist.HashStore(), rank=0, world_size=1)
        except Exception as told:
            print("told:", type(told).__name__, told, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
    ended = run_python(script)
    assert ended.returncode == 0, ended.stderr
    errors = ("ImportError", "RuntimeError", "SyntaxError")
    assert ended.stdout.splitlines() == [line for error in errors for line in ("gloo works", f"told: {error} broken")]


def test_a_plugin_that_cannot_register_says_so_and_lets_torch_be(run_forked):
    script = """
import torch.distributed as dist
real = dist.Backend.register_backend
def refuse(*args, **options):
    raise RuntimeError("no more backends")
dist.Backend.register_backend = refuse
if "phalanx" in dist.Backend.backend_list:
    dist.Backend.backend_list.remove("phalanx")
from phalanx import _plugin
_plugin.autoload()
dist.Backend.register_backend = real
_plugin.autoload()
print("phalanx" in dist.Backend.backend_list)
"""
    ended = run_forked(script)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "True"
    assert "phalanx: can't be set up at import torch" in ended.stderr
    assert "no more backends" in ended.stderr


def test_a_job_that_destroys_nothing_ends_silently(run_forked):
    script = ALONE.format(backend="'phalanx', ").replace("dist.destroy_process_group()", "")
    script += "work = dist.all_reduce(tensor, async_op=True)\nprint(work.get_future().wait()[0].tolist())\n"
    ended = run_forked(script)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "[1.0, 1.0, 1.0]"
    # torch itself may remind of destroy_process_group; nothing of ours may say anything.
    assert "nanobind" not in ended.stderr
    assert "phalanx" not in ended.stderr
    assert "Traceback" not in ended.stderr


def test_phalanx_lists_what_it_exports(run_forked):
    script = "import phalanx; print([n for n in dir(phalanx) if not hasattr(phalanx, n)], len(dir(phalanx)))"
    assert run_forked(script).stdout.strip() == f"[] {len(phalanx.__all__)}"
    failed = run_forked("import phalanx; phalanx.nothing")
    assert "module 'phalanx' has no attribute 'nothing'" in failed.stderr
