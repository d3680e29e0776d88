"""Docstrings describe the arguments that exist, each by a phrase that stands alone."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from pathlib import Path

import pytest
import torch

import phalanx

PACKAGES = [phalanx, phalanx.checkpoint, phalanx.data, phalanx.parallel, phalanx.testing, phalanx.train]
# Beginnings that lean on the parameter's name or on the sentence before: "timeout: Of collectives".
FRAGMENT = re.compile(
    r"(Of|As|By|Like|Among|Given|Who|Whom|Whose|What|How|Where|When|Why|So|In|On|At|To|For|From|That|Once|With|Without"
    r"|Instead|Let|Leave|Refuse|Returns?|Raises?|Takes|Called|Runs|Starts|Waits|Do|Say|Follow|This one|There|It|Its"
    r"|Up to|Also|Until|After|Before|Default:?)\b"
)


def public_callables():
    seen = set()
    for package in PACKAGES:
        for name in package.__all__:
            thing = getattr(package, name)
            if id(thing) in seen or not callable(thing):
                continue
            seen.add(id(thing))
            yield f"{package.__name__}.{name}", thing
            for method, function in vars(thing).items() if inspect.isclass(thing) else ():
                if inspect.isfunction(function) and not method.startswith("_") and function.__doc__:
                    yield f"{package.__name__}.{name}.{method}", function


DESCRIBED_BY = {  # what has arguments of that name, too
    "phalanx.DataLoader": torch.utils.data.DataLoader,
    "phalanx.DistributedDataParallel": torch.nn.parallel.DistributedDataParallel,
    "phalanx.Trainer": phalanx.train.Settings,
}
CALLABLES = dict(public_callables())


def described(docstring: str, title: str) -> dict[str, str]:
    """Return the descriptions in a section, by name."""
    _, _, section = docstring.partition(f"\n{title}:\n")
    lines = itertools.takewhile(lambda line: not line or line.startswith(" "), section.splitlines())
    return dict(re.findall(r"^    (\w+): (.*)", "\n".join(lines), re.MULTILINE))


@pytest.mark.parametrize("name", CALLABLES)
def test_help_describes_the_arguments_that_exist(name):
    thing = CALLABLES[name]
    docstring = inspect.getdoc(thing)
    assert docstring
    arguments, attributes = described(docstring, "Args"), described(docstring, "Attributes")
    assert [text for text in (*arguments.values(), *attributes.values()) if FRAGMENT.match(text)] == []
    parameters = {*inspect.signature(thing).parameters} - {"self"}
    assert {*arguments} <= parameters
    if arguments and name in DESCRIBED_BY:
        parameters -= {*inspect.signature(DESCRIBED_BY[name]).parameters}
    if arguments:
        assert parameters <= {*arguments}


def test_every_parameter_is_described_by_a_noun_phrase():
    for path in sorted(Path(phalanx.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                docstring = ast.get_docstring(node) or ""
                for title in ("Args", "Attributes"):
                    fragments = [text for text in described(docstring, title).values() if FRAGMENT.match(text)]
                    assert fragments == [], f"{path}: {node.name}"
