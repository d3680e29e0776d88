"""torch's private names: used in one module, and each may go without a silent loss."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx import _torch
from phalanx._torch import lookup

PACKAGE = Path(phalanx.__file__).parent
# Private names of Python's own library, and the ones that a namedtuple has.
PYTHONS = {
    "_start_method",
    *("_reader", "_writer"),  # of multiprocessing
    *("_exit", "_getframe", "_replace", "_asdict", "_fields"),
    *("_xoptions", "_startTime", "_Py_GetConfig", "_Py_GetConfigsAsDict"),  # of sys, of logging, of CPython itself
    *("_config", "_inheriting", "_forkserver", "_forkserver_alive_fd", "_preload_modules"),  # of multiprocessing
    *("_forkserver_pid", "_stop", "_args_from_interpreter_flags", "_flush_std_streams", "_run_exitfuncs"),  # of it too
    *("_must_rewrite", "_fixtureinfo", "_excinfo", "_explicit_tearDown", "_setupstate"),  # of pytest
    "_traceback_filter",  # of it too
    *("_inner_hookexec", "_collector"),  # of pluggy, of warnings
    *("_option_string_actions", "_optionals", "_positionals"),  # of argparse
}
NEEDED = {  # by a group, an all_reduce and DistributedDataParallel, and nothing replaces them
    *("C10dBackend", "register_backend", "set_default_backend", "dispatch_keys", "BatchNorm", "queue_callback"),
    *("check_input_dim", "check_non_zero_input_channels", "current_graph_task_id", "current_autograd_node"),
} - ({"C10dBackend"} if _torch.version() < (2, 14) else set())
LOSSY = {key for key, name in _torch.NAMES.items() if name.loses}


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """Return the parsed source of each module of the package."""
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", "_phalanx_"))


def own_names() -> set[str]:
    """Return every name that phalanx gives to something."""
    own = set()
    for node in (node for tree in trees().values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            own.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            own |= {alias.asname or alias.name for alias in node.names if (node.module or "").startswith("phalanx")}
    return own


def torch_imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield what a file imports from torch: the full name, and the file's name for it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    yield alias.name, alias.asname or "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                yield f"{node.module}.{alias.name}", alias.asname or alias.name


def uses(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """Yield where a file uses a private name of torch, or of whatever it may be that is neither ours nor Python's."""
    imported = list(torch_imports(tree))
    roots = {local for _, local in imported}
    yield from (f"import {name}" for name, _ in imported if any(is_private(part) for part in name.split(".")))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in PYTHONS:
            if node.attr not in own or ast.unparse(node).split(".")[0] in roots:
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if is_private(name) and name not in own | PYTHONS:
                yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize(
    "script",
    [
        "import torch\ntorch._C._dispatch_keys(x)",
        "import torch.distributed as dist\ndist.distributed_c10d._get_default_group()",
        "from torch.distributed import distributed_c10d as c10d\nc10d._world.pg_map",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "import torch._dynamo",
        "def f():\n    import torch\n    return torch.autograd._profiler_enabled()",
        "group._register_backend(device)",
        "getattr(module, '_orig_mod')",
    ],
)
def test_the_search_finds(script):
    assert list(uses(ast.parse(script), {"_C", "_own"}))


def test_private_names_of_torch_are_used_in_one_module():
    own = own_names()
    elsewhere = {path: tree for path, tree in trees().items() if path.parent.name != "_torch"}
    found = {path.name: list(uses(tree, own)) for path, tree in elsewhere.items()}
    assert not {name: places for name, places in found.items() if places}, "add them to phalanx/_torch/names.py"


def test_the_table_has_what_is_asked_for_and_nothing_else():
    asked, attributes = set(), set()
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "phalanx._torch":
                asked |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "_torch":
                asked.add(node.attr)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("_torch.attribute_of", "attribute_of"):
                attributes |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "__getattr__":  # in that module alone
                asked |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    assert asked >= _torch.NAMES.keys()
    assert all(hasattr(_torch, name) for name in asked - _torch._MODULES)
    assert _torch.ATTRIBUTES.keys() - attributes == {"_threads", "_devices"}  # of gloo_options


def test_this_torch_has_every_name():
    for name in _torch.NAMES.values():
        _torch._find(name.path)
    for owner, methods in _torch.OVERRIDDEN.items():
        for method in methods:
            _torch._find(f"{owner}.{method}")
    options = _torch.gloo_options(threads=2)
    assert options._threads == 2
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], lr=0.1), 1)
    assert {key for key in vars(scheduler) if is_private(key)} <= _torch.SCHEDULER_COUNTERS
    several = torch.optim.lr_scheduler.SequentialLR(scheduler.optimizer, [scheduler], [])
    assert {_torch.PARTS_OF_SCHEDULER, _torch.MILESTONES_OF_SCHEDULER} <= vars(several).keys()
    assert _torch.PARTS_OF_SCHEDULER in vars(torch.optim.lr_scheduler.ChainedScheduler([scheduler]))
    assert _torch.MARK_IGNORED_BY_DDP in inspect.getsource(torch.nn.parallel.distributed)
    assert _torch.MARK_STEPS_IN_BACKWARD in inspect.getsource(torch.nn.parallel.distributed)


@pytest.mark.slow
def test_two_ranks_train_without_a_name_or_say_which_is_missing():
    """All that can be replaced at once, all that this training does not need at once, and each other one alone."""
    spare = _torch.NAMES.keys() - LOSSY - NEEDED
    of_several = ("record_function_exit", "FrameAction")  # what needs them needs others as well
    cases = [sorted(LOSSY), sorted(spare), *([key] for key in (*of_several, *sorted(NEEDED)))]
    program = Path(__file__).with_name("without_names.py")
    ended = subprocess.run(
        [sys.executable, program], input=json.dumps(cases), capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    for keys, (error, warned) in zip(cases, json.loads(ended.stdout), strict=True):
        names = [_torch.NAMES[key] for key in keys]
        if keys[0] in NEEDED:
            said = f"ImportError: torch {torch.__version__} has no {names[0].path}, which phalanx needs {names[0].use}."
            assert error.startswith(said), (keys, error, ended.stderr[-2000:])
        else:
            assert not error, (keys, error, ended.stderr[-4000:])
        if keys == cases[0]:
            told = {name.path for name in names if any(f"no {name.path}: {name.loses}" in text for text in warned)}
            assert told >= {_torch.NAMES[key].path for key in ("is_profiling", "broadcast_coalesced", "disable_dynamo")}


def test_what_replaces_a_name_does_the_same():
    ones, twos = [torch.ones(2), torch.ones(1)], [torch.full((2,), 2.0), torch.full((1,), 3.0)]
    for key, args in (("foreach_copy_", (twos,)), ("foreach_add_", (twos,)), ("foreach_mul_", (1.5,))):
        mine, torchs = [t.clone() for t in ones], [t.clone() for t in ones]
        _torch.NAMES[key].instead(mine, *args)
        getattr(_torch, key)(torchs, *args)
        assert [t.tolist() for t in mine] == [t.tolist() for t in torchs]


def test_a_name_that_nothing_replaces_raises(monkeypatch):
    def lack(path):
        raise ImportError(path)

    monkeypatch.setattr(lookup, "_find", lack)
    for key, name in _torch.NAMES.items():
        monkeypatch.delitem(vars(lookup), key, raising=False)
        if name.instead is not None:
            with pytest.warns(RuntimeWarning, match=f"torch {torch.__version__.replace('+', '.')} has no {name.path}"):
                assert getattr(lookup, key) is name.instead
            vars(lookup).pop(key)
        else:
            with pytest.raises(ImportError, match=f"has no {name.path}, which phalanx needs"):
                getattr(lookup, key)
    with pytest.raises(ImportError, match=r"Joinable._join_config, which phalanx needs for model.join()"):
        _torch.attribute_of(object(), "_join_config")


def in_torch(source: str, name: str):
    """Return a function of that source that looks as if torch.distributed had it."""
    namespace = {"devices": _torch.devices_of_new_group, "asked": _torch.backend_argument, "sys": sys}
    exec(compile(source, dist.distributed_c10d.__file__, "exec"), namespace)
    return namespace[name]


def test_other_devices_are_found_whatever_torch_calls_them(monkeypatch):
    both = dist.BackendConfig(dist.Backend("cpu:phalanx,cuda:nccl"))
    assert in_torch("def make(renamed): return devices('phalanx')", "make")(both) == {"cpu": "phalanx", "cuda": "nccl"}
    torchs = in_torch("def make(): return devices('phalanx')", "make")
    assert torchs() == {"cpu": "phalanx"}  # there is no other device here
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with pytest.raises(ImportError, match="has no BackendConfig where it makes a group, which phalanx needs to serve"):
        torchs()


def test_a_backend_that_torch_does_not_tell_is_a_warning():
    assert in_torch("def init_process_group(backend=None): return asked(sys._getframe())", "init_process_group")() == ""
    renamed = in_torch("def init_process_group(name): return asked(sys._getframe())", "init_process_group")
    with pytest.warns(RuntimeWarning, match="does not tell the backend that init_process_group was given"):
        assert renamed("phalanx") is None


def device_types(rank, world_size):
    dist.init_process_group("cpu:phalanx,cuda:gloo")
    total = torch.ones(2)
    dist.all_reduce(total)
    return total.tolist(), sorted(device.type for device in dist.group.WORLD._device_types)


def test_a_group_of_two_devices_has_both(run_ranks):
    assert run_ranks(device_types, 2, init=False) == [([2.0, 2.0], ["cpu", "cuda"])] * 2
