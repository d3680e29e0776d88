"""What `help()` shows of every public name: arguments that exist, each described by a phrase that stands alone."""

from __future__ import annotations

import inspect
import itertools
import re

import pytest
import torch

import phalanx

PACKAGES = [phalanx, phalanx.checkpoint, phalanx.data, phalanx.parallel, phalanx.testing, phalanx.train]
# Beginnings that lean on the parameter's name or on the sentence before: "timeout: Of collectives".
FRAGMENT = re.compile(
    r"(Of|As|By|Like|Among|Given|Who|Whom|Whose|What|How|So|In place|Instead|Let|Leave|Refuse|Returns?|Takes|Do|Say"
    r"|Follow|This one|Its|Default:?)\b"
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


TORCHS = {
    "phalanx.DataLoader": torch.utils.data.DataLoader,
    "phalanx.DistributedDataParallel": torch.nn.parallel.DistributedDataParallel,
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
    if arguments and name in TORCHS:  # what its own documentation describes
        parameters -= {*inspect.signature(TORCHS[name]).parameters}
    if arguments:
        assert parameters <= {*arguments}
