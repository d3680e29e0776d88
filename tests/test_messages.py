"""The one reader of messages: a value of the declared form, or a refusal that names what is wrong."""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import phalanx
from phalanx.wire.messages import (
    LOCAL,
    GarbledError,
    as_facts,
    between,
    cropped,
    fits,
    one_of,
    read_value,
    understand,
)

PACKAGE = Path(phalanx.__file__).parent
OWN = "passed by the process that starts this one"
CHILD = "written by a process that this one has started"
FOREIGN = "the form of another program"
KEPT = "a file whose numbers may be NaN, checked by its own digest or key by key"
PARSERS = {
    "wire/messages.py": "the reader",
    "wire/packets.py": "between a supervisor and its own processes",
    **dict.fromkeys(
        ("host/block_pool.py", "launch/processes/forker.py", "launch/replicas/replicator.py",
         "launch/warm/loader.py", "doctor/torch_side.py"), OWN,
    ),
    **dict.fromkeys(
        ("doctor/engines.py", "doctor/exercise.py", "launch/nodes/questions.py", "testing/fast_ranks.py",
         "testing/fast_server.py"), CHILD,
    ),
    **dict.fromkeys(("diagnose/stacks.py", "launch/nodes/notices.py"), FOREIGN),
    **dict.fromkeys(
        ("checkpoint/ckpt.py", "checkpoint/disk/folder.py", "checkpoint/publication/contents.py",
         "checkpoint/state/image.py", "train/report/metrics.py",
         "train/resume/identity.py"), KEPT,
    ),
}  # fmt: skip
"""Files that parse JSON, and the reason of each that does not ask the reader."""


@dataclasses.dataclass(frozen=True)
class Port:
    number: Annotated[int, between(1, 65_535)]
    name: Annotated[str, cropped(3)] = ""


@dataclasses.dataclass(frozen=True)
class Host:
    ports: tuple[Port, ...]
    kind: Literal["cpu", "gpu"] = "cpu"
    load: float | None = None
    ranks: dict[int, str] = dataclasses.field(default_factory=dict)
    handle: Any = dataclasses.field(default=None, metadata=LOCAL)


HOST = Host((Port(1, "abc"), Port(2)), "gpu", 0.5, {3: "x"})
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["ports", "kind", "load", "number"]), inner),
)


def test_what_is_told_is_what_is_read_but_for_what_stays_here():
    told = as_facts(dataclasses.replace(HOST, handle=object()))
    assert understand(json.dumps(told), Host) == HOST
    assert "handle" not in told
    assert read_value({**told, "handle": 1, "unknown": 2}, Host) == HOST
    assert read_value(as_facts(Port(7, "abcdef")), Port) == Port(7, "abc")


@pytest.mark.parametrize(
    ("told", "shape", "why"),
    [
        ({"ports": [{"number": 0}]}, Host, "ports: number: 0 is not a number from 1 to 65535"),
        ({"ports": [{"number": True}]}, Host, "ports: number: True is not a whole number"),
        ({"kind": "cpu"}, Host, "{'kind': 'cpu'} has no ports"),
        ({"ports": [], "kind": "tpu"}, Host, "kind: 'tpu' is not one of cpu, gpu"),
        ({"ports": [], "load": "1"}, Host, "load: '1' is not a number"),
        ({"ports": [], "ranks": {"-1": "x"}}, Host, "ranks: '-1' is not a whole number"),
        ([1, 2], tuple[int, str], "2 is not a text"),
        ([1], tuple[int, str], "[1] is not a list of 2"),
        ({"a": 1}, {"b": int}, "{'a': 1} is not a table with b"),
        ("x", [str], "'x' is not a list"),
        (3, one_of(1, 2), "3 is not one of 1, 2"),
        (None, int, "None is not a whole number"),
        (1, None, "1 is not nothing"),
    ],
)
def test_a_refusal_names_what_is_wrong(told, shape, why):
    with pytest.raises(GarbledError) as refused:
        read_value(told, shape)
    assert str(refused.value) == why
    assert not fits(told, shape)


@given(JSON)
def test_anything_is_a_value_of_the_form_or_is_refused(told):
    for shape in (Host, Port, list[Host], dict[str, Port], Port | Host | None, {"ports": [Port]}):
        fits(told, shape)  # and raises nothing else


@pytest.mark.parametrize(
    "text", ["", "[" * 100_000, '{"number": 1e999}', '{"number": NaN}', '{"number": ' + "1" * 400 + "}"]
)
def test_what_is_no_json_of_numbers_that_can_be_computed_with_is_refused(text):
    with pytest.raises(GarbledError):
        understand(text, Port)


def test_whoever_reads_what_others_say_asks_the_one_reader():
    readers = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("loads", "load") and ast.unparse(node.value) == "json"
    }
    assert readers == {*PARSERS}
