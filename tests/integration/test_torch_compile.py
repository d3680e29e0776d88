"""What ranks do without torch._dynamo, and that whoever needs it finds torch's own."""

from __future__ import annotations

import textwrap

import pytest

from tests.launch.jobs import run_job

# `step` runs once, if possible without the module.
STEP = """
import sys, torch

def num_loaded():
    return sum(name.startswith("torch._dynamo.") for name in sys.modules)

def step(batch):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return batch + 1

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.AdamW(model.parameters())
optimizer.load_state_dict(optimizer.state_dict())
step(torch.ones(1, 2))
"""
POSTPONED = "from phalanx._torch.dynamo import postpone_import\npostpone_import()\n" + STEP
IS_TORCHS = """
module = sys.modules["torch._dynamo"]
assert module is torch._dynamo and module.__file__.endswith("__init__.py") and num_loaded() > 9
assert sys.modules["torch._dynamo.config"] is module.config
assert module.config.__spec__.name == "torch._dynamo.config" and "Found" not in repr(module.config.__spec__)
assert torch.optim.Optimizer.zero_grad.__wrapped__.__dynamo_disable._torchdynamo_disable
step(torch.ones(1, 2))
"""


def run(forked, *sources):
    done = forked.run("-c", "".join(map(textwrap.dedent, sources)))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.usefixtures("warm_jobs")
def test_a_rank_trains_without_it(tmp_path):
    source = f"""
    from torch.distributed import init_process_group
    {textwrap.indent(STEP, "    ").strip()}
    init_process_group("phalanx")
    import phalanx
    phalanx.DistributedDataParallel(model)(torch.ones(1, 2)).sum().backward()
    print("loaded", num_loaded())
    """
    done = run_job(tmp_path, source)
    assert done.stdout.count("loaded 0") == 2, done.stderr


def test_what_compiles_breaks_where_it_always_does(forked):
    counted = "print(torch._dynamo.explain(step)(torch.ones(1, 2)).graph_break_count)"
    assert run(forked, POSTPONED, "assert not num_loaded()\n", counted) == run(forked, STEP, counted) != "0\n"


def test_an_import_of_a_package_that_comes_with_it_asks_for_nothing(forked):
    """torch's own module, imported in the middle of such a package, would find it half done."""
    source = """
    from phalanx._torch.dynamo import postpone_import
    postpone_import()
    import torch._dynamo
    from torch.distributed.fsdp import fully_shard
    import torch.distributed.nn.functional as functional
    from torch.distributed.tensor import DTensor
    print(torch._dynamo.config.__name__)
    """
    assert run(forked, source) == "torch._dynamo.config\n"


WAYS_TO_ASK = {
    "a module in it": "import torch._dynamo.config",
    "a name": """
        from torch._dynamo import graph_break
        assert graph_break.__module__.startswith("torch")
        try:
            torch._dynamo.nonsense
        except AttributeError as error:
            assert "torch._dynamo" in str(error), error
        torch.compiler.disable(lambda: None)
    """,
    "setting a name": "torch._dynamo.name = 1; assert torch._dynamo.name == 1; del torch._dynamo.name",
    "an early import": """
        early = torch._dynamo
        from unittest import mock
        with mock.patch.object(early, "explain", 1):
            assert torch._dynamo.explain == 1
        assert torch._dynamo.explain != 1 and early.config is torch._dynamo.config and "explain" in dir(early)
    """,
    "a package that comes with it": """
        assert not hasattr(torch.distributed, "nonsense") and not num_loaded()
        torch.distributed.nn.functional.all_reduce
        torch.fx.experimental.symbolic_shapes.ShapeEnv
        assert "__getattr__" not in vars(torch.distributed)
    """,
    "an import that fails": """
        import builtins
        torchs = builtins.__import__
        def fails(name, *args):
            if name == "sympy":
                raise KeyboardInterrupt
            return torchs(name, *args)
        builtins.__import__ = fails
        try:
            torch._dynamo.config
        except KeyboardInterrupt:
            builtins.__import__ = torchs
        torch._dynamo.config
    """,
    "many threads": """
        import importlib, threading
        failures = []
        def ask():
            try:
                torch.optim.SGD([torch.ones(1)], 0.1).step()
                importlib.import_module("torch._dynamo").config.suppress_errors
                torch.optim.SGD([torch.ones(1)], 0.1).step()
            except BaseException as error:
                failures.append(error)
        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
    """,
}


@pytest.mark.parametrize("way", WAYS_TO_ASK)
def test_whoever_asks_for_more_gets_torchs_own(forked, way):
    run(forked, POSTPONED, "assert not num_loaded()\n", WAYS_TO_ASK[way], IS_TORCHS)


def test_whoever_looks_at_all_modules_does_not_import_it(forked):
    looks = """
    import importlib.util, inspect, warnings, unittest
    assert inspect.getmodule(print).__name__ == "builtins"
    with unittest.TestCase().assertWarns(UserWarning):
        warnings.warn("one")
    assert importlib.util.find_spec("torch._dynamo") is not None
    assert not num_loaded()
    """
    run(forked, POSTPONED, looks)


def test_it_stays_where_it_has_been_imported(forked):
    run(forked, "import torch._dynamo\n", POSTPONED, IS_TORCHS)
