"""Every public name has an example in its docstring, which runs; or a reason why it has none."""

from __future__ import annotations

import contextlib
import doctest
import inspect
import os
import re

import pytest

from phalanx.testing import run_ranks
from tests.test_docstrings import CALLABLES as OWN

INHERITED = {
    f"{name}.{method}": function
    for name, thing in OWN.items()
    if inspect.isclass(thing)
    for method, function in inspect.getmembers(thing, inspect.isfunction)
    if not method.startswith("_") and function.__module__.startswith("phalanx.") and function.__doc__
}
CALLABLES = INHERITED | OWN
PRELUDE = """
import torch
import torch.distributed as dist
from torch import nn

import phalanx

session = phalanx.init()
"""
A_RUN = """
_linear = nn.Linear(8, 1)
_data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
phalanx.Trainer(
    _linear, torch.optim.SGD(_linear.parameters()), nn.functional.mse_loss, max_epochs=1, folder="runs/example"
).fit(_data)
"""

_RAISED = "phalanx raises it; the pages of errors/ show when, and how it is caught"
_IN_A_TEST = "needs a function of a test module; guides/test_your_code.md shows it"
WITHOUT = {
    **dict.fromkeys(
        (
            "phalanx.CheckpointError",
            "phalanx.CollectiveMismatch",
            "phalanx.CollectiveTimeout",
            "phalanx.GroupAborted",
            "phalanx.GroupUnusable",
            "phalanx.NonFinite",
            "phalanx.NotPublished",
            "phalanx.OutOfSharedMemory",
            "phalanx.RankFailed",
            "phalanx.ReplicaMismatch",
            "phalanx.WrongResult",
        ),
        _RAISED,
    ),
    **dict.fromkeys(
        (
            "phalanx.testing.Ranks",
            "phalanx.testing.Ranks.kill",
            "phalanx.testing.Ranks.stop",
            "phalanx.testing.Ranks.resume",
            "phalanx.testing.Ranks.wait_until_reached",
            "phalanx.testing.Ranks.release",
            "phalanx.testing.Ranks.join",
            "phalanx.testing.await_release",
            "phalanx.testing.reached",
        ),
        _IN_A_TEST,
    ),
    "phalanx.DistributedDataParallel.divide_averaging": "the Trainer calls it; a division is not public",
    "phalanx.GroupOptions.over": "the backend calls it when it makes a group",
    "phalanx.testing.Ending.for_others": "the launcher calls it for what it tells other processes",
    "phalanx.Trainer.stop": "a callback calls it while fit runs; guides/train_well.md shows it",
    "phalanx.ZeroRedundancyOptimizer.join_hook": "torch's Join calls it",
}


def example_of(name: str) -> str:
    """Return the docstring with the example that shows this name: its own, or that of its class."""
    own = inspect.getdoc(CALLABLES[name]) or ""
    owner, _, method = name.rpartition(".")
    if ">>>" in own or owner not in CALLABLES:
        return own if ">>>" in own else ""
    of_class = inspect.getdoc(CALLABLES[owner]) or ""
    shown = "\n".join(re.findall(r"^ *(?:>>>|\.\.\.) (.*)", of_class, re.MULTILINE))
    return of_class if f".{method}(" in shown else ""


WITH_EXAMPLE = [name for name, thing in CALLABLES.items() if ">>>" in (inspect.getdoc(thing) or "")]
STARTS_RANKS = re.compile(r"(?:>>>|\.\.\.) .*(spawn|_ranks)\(")
STARTING = [name for name in WITH_EXAMPLE if STARTS_RANKS.search(example_of(name))]


def run_examples(rank, world_size, names, folder):
    """Run the doctests of docstrings as the only rank of a job, and return what went wrong."""
    return [run_example(name, folder) for name in names]


def run_example(name, folder):
    os.chdir(folder)
    shown: list[str] = []
    given: dict[str, object] = {}
    with contextlib.redirect_stdout(open(os.devnull, "w")):
        exec(PRELUDE + (A_RUN if "runs/example" in example_of(name) else ""), given)
    test = doctest.DocTestParser().get_doctest(example_of(name), given, name, None, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(test, out=shown.append)
    given["phalanx"].shutdown()
    return "".join(shown)


@pytest.mark.parametrize("name", [name for name in CALLABLES if name not in WITHOUT])
def test_a_public_name_has_an_example(name):
    assert example_of(name), f"{name}: write an example into its docstring, or say in WITHOUT why it has none"


@pytest.mark.parametrize("name", [name for name in WITH_EXAMPLE if name not in STARTING])
def test_an_example_does_what_it_says(name, tmp_path):
    assert run_ranks(run_examples, 1, [name], str(tmp_path), init=False) == [[""]]


def test_examples_that_start_ranks_do_what_they_say(tmp_path):
    """In one process: the first of its calls starts what ranks are forked from."""
    assert "phalanx.spawn" in STARTING
    (said,) = run_ranks(run_examples, 1, STARTING, str(tmp_path), init=False)
    assert {name: text for name, text in zip(STARTING, said, strict=True) if text} == {}


def test_only_names_without_an_example_have_a_reason():
    assert {name for name in WITHOUT if name not in CALLABLES or example_of(name)} == set()
