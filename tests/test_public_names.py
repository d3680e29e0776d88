"""What users see of the package: every name is there, lazily, with a type that checkers and editors know."""

from __future__ import annotations

import ast
import inspect
import os
import pydoc
import subprocess
import sys
import typing
from importlib import resources
from pathlib import Path

import pytest
import torch

import phalanx
import phalanx.checkpoint
import phalanx.testing
import phalanx.train
from phalanx.train.settings import GivenSettings

TYPED_SCRIPT = Path(__file__).with_name("typed_script.py")
# What our names and a user's script import on the way without a type from it: most of the time of reading everything.
MYPY = """
[mypy]
strict = True
[mypy-IPython.*,matplotlib.*,numpy.*,prompt_toolkit.*,pygments.*,pyparsing.*,sklearn.*,sympy.*,traitlets.*]
follow_imports = skip
follow_imports_for_stubs = True
[mypy-torch._decomp.*,torch._dynamo.*,torch._export.*,torch._functorch.*,torch._inductor.*,torch._native.*]
follow_imports = skip
[mypy-torch._prims.*,torch._prims_common.*,torch._refs.*,torch._subclasses.*,torch.ao.*,torch.distributions.*]
follow_imports = skip
[mypy-torch.export.*,torch.fx.*,torch.jit.*,torch.onnx.*,torch.profiler.*,torch.testing.*,torch.utils._sympy.*]
follow_imports = skip
[mypy-torch.distributed.tensor.*,torch.distributed.fsdp.*,torch.distributed.pipelining.*]
follow_imports = skip
"""
PACKAGES = ("checkpoint", "data", "parallel", "testing", "train")


@pytest.mark.parametrize(
    "package", [phalanx, phalanx.checkpoint, phalanx.testing, phalanx.train], ids=lambda package: package.__name__
)
def test_type_checkers_see_the_names_that_are_loaded_on_first_use(package):
    tree = ast.parse(Path(package.__file__).read_text())
    [shown] = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    names = {alias.name for node in shown.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    loaded = {*" ".join(package._MODULES.values()).split(), *getattr(package, "_PACKAGES", ())}
    assert names == loaded == {*package.__all__} - {"__version__"}
    for name in package.__all__:
        assert getattr(package, name) is not None


def test_import_phalanx_alone_reaches_every_package():
    # The first look is at a name inside, in a process of its own: nothing else may have imported the package.
    code = f"""
import os, sys, torch
assert "phalanx" not in sys.modules
for name in {PACKAGES}:
    if (child := os.fork()) == 0:
        import phalanx
        print(getattr(phalanx, name).__all__, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
    environ = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "".join(f"{getattr(phalanx, name).__all__}\n" for name in PACKAGES)


def test_import_phalanx_imports_nothing_else_of_it():
    code = "import sys, phalanx; print([m for m in sys.modules if m.partition('.')[0] in ('phalanx', 'torch')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "['phalanx']\n"


def test_the_settings_are_in_the_trainers_signature_with_types_and_defaults():
    types = typing.get_type_hints(GivenSettings)
    assert types == typing.get_type_hints(phalanx.train.Settings)
    settings = inspect.signature(phalanx.train.Settings).parameters
    assert [*types] == [*settings]
    of_trainer = inspect.signature(phalanx.Trainer).parameters
    assert dict(settings) == {name: of_trainer[name] for name in [*of_trainer][-len(settings) :]}
    assert "min_delta: 'float' = 0.0" in pydoc.render_doc(phalanx.Trainer)
    assert "min_delta" not in inspect.signature(OfMine).parameters


class OfMine(phalanx.Trainer):
    def __init__(self, folder):
        super().__init__(torch.nn.Linear(1, 1), "adam", folder=folder, max_epochs=1)


def test_a_users_script_passes_mypy_strict(tmp_path, cache):
    pytest.importorskip("mypy")
    if not torch.__version__.startswith("2.15."):
        pytest.skip("torch's own annotations differ by version")
    assert resources.files("phalanx").joinpath("py.typed").is_file()
    (tmp_path / "mypy.ini").write_text(MYPY)
    command = [sys.executable, "-m", "mypy", f"--cache-dir={cache.mkdir('mypy')}", str(TYPED_SCRIPT)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "Success: no issues found in 1 source file\n"), done
