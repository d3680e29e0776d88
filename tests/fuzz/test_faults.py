"""What the fuzzer says of a fault: it is found, cut down to what matters, and written as a script that shows it."""

from __future__ import annotations

import random

import pytest
import torch

from phalanx.testing.fuzz import shrink as shrinking
from phalanx.testing.fuzz.command import main
from phalanx.testing.fuzz.compare import difference, reduced
from phalanx.testing.fuzz.memory import LAYOUTS, Block, copy_bits
from phalanx.testing.fuzz.program import GroupPlan, Program, Step, draw_place, draw_program
from phalanx.testing.fuzz.session import Outcome, Session, joined
from phalanx.testing.fuzz.shrink import Shrinker, write_script

WORLD = GroupPlan((0, 1), "world")
REFUSED = Step("all_reduce", dtype="float8_e5m2", shape=(8,), values="bits")  # has no reductions


def test_a_call_that_raises_is_found_cut_down_and_written_as_a_script(tmp_path, forked):
    fine = Step("all_reduce", async_op=True, lag=1)
    program = Program(2, (), (WORLD,), (fine, REFUSED, fine), num_rounds=1)
    found, outcome = shrinking.shrink([program], Outcome("?"), "arithmetic", 60.0, 200.0)
    assert [step.dtype for step in found.steps] == ["float8_e5m2"]
    assert "step 0" in outcome.fault
    assert "can't be reduced" in outcome.fault
    path = write_script(found, outcome.fault, "python -m phalanx.testing.fuzz", "arithmetic", str(tmp_path), "found")
    done = forked.run(path)
    assert done.returncode == 1, done
    assert "can't be reduced" in done.stdout


def test_a_program_that_is_right_has_no_fault():
    program = Program(2, (), (WORLD,), (Step("all_reduce"), Step("messages", async_op=True)))
    session = Session(program, "arithmetic", 60.0)
    try:
        outcome = session.run(program)
    finally:
        session.close()
    assert (outcome.fault, outcome.step) == ("", None)
    assert outcome.judged["arithmetic"] > 0


class Wrong(Shrinker):
    """A shrinker of programs that "fail" if they have a broadcast before a barrier; starts no ranks."""

    def _fails_once(self, program, *, fresh=False):
        names = [step.name for step in program.steps]
        return "broadcast" in names and "barrier" in names[names.index("broadcast") :]


def test_only_the_steps_that_matter_are_left():
    source = random.Random(3)
    program = draw_program(source, draw_place(source, (4,), 1), 200)
    shrinker = Wrong("arithmetic", 1.0, 1e6)
    assert shrinker.reproduces(program, 4)
    found = shrinker.shrunk(program)
    assert [step.name for step in found.steps] == ["broadcast", "barrier"]
    assert {(step.async_op, step.source_layout, step.values) for step in found.steps} == {(False, "plain", "small")}
    assert (found.environ, found.hosts, found.num_rounds) == ({}, (), 1)


def test_programs_that_are_joined_keep_the_groups_of_their_steps():
    one = Program(3, (), (GroupPlan((0, 1, 2), "world"), GroupPlan((2, 0))), (Step("barrier", 1),))
    other = Program(3, (), (GroupPlan((0, 1, 2), "world"), GroupPlan((1, 2))), (Step("barrier", 1), Step("barrier")))
    both = joined([one, other])
    assert [both.groups[step.group].ranks for step in both.steps] == [(2, 0), (1, 2), (0, 1, 2)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex128, torch.int16])
def test_a_write_beside_a_tensor_or_into_an_input_is_noticed(layout, dtype):
    values = torch.ones(4, 3, dtype=dtype)
    block = Block(values, values.shape, dtype, layout)
    assert block.taken().tolist() == values.tolist()
    assert block.give_up(is_input=True) == ""
    block = Block(values, values.shape, dtype, layout)
    copy_bits(block.tensor, torch.zeros_like(values))
    assert block.give_up(is_input=True) == "the call has changed its input"
    for at in (0, -1):
        block = Block(None, values.shape, dtype, layout)
        block._bytes[at] = 1
        assert block.give_up(is_input=False) == "the call has written beside its tensor"


INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_arithmetic_reduces_integers_as_python_does(dtype):
    info = torch.iinfo(dtype)
    rows = [[info.min, info.max, 3, info.max - 1, 0], [info.min, info.max, 5, 7, 1], [info.max, 2, 4, info.min, 2]]
    parts = [torch.tensor(row, dtype=dtype) for row in rows]
    columns = list(zip(*rows, strict=True))
    size = 1 << info.bits
    wrapped = [(sum(column) - info.min) % size + info.min for column in columns]
    assert reduced(parts, "SUM").tolist() == wrapped
    assert reduced(parts, "MIN").tolist() == [min(column) for column in columns]
    assert reduced(parts, "MAX").tolist() == [max(column) for column in columns]
    means = [abs(sum(column)) // 3 * (-1 if sum(column) < 0 else 1) for column in columns]
    assert reduced(parts, "AVG").tolist() == means


def test_a_result_beyond_what_any_order_gives_is_different():
    parts = [torch.tensor([1e8, 1.0]), torch.tensor([1.0, 2.0]), torch.tensor([-1e8, 3.0])]
    right = reduced(parts, "SUM")
    assert difference(torch.tensor([0.0, 6.0]), right, parts, "SUM") == ""
    assert difference(torch.tensor([0.0, 6.00001]), right, parts, "SUM").startswith("1 of 2 elements differ, from 1")
    assert difference(right + 64, right, parts, "SUM").startswith("2 of 2 elements differ")
    assert difference(torch.tensor([1.0]), torch.tensor([1.0])) == ""
    assert difference(torch.tensor([0.0]), torch.tensor([-0.0])) != ""


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--against", "nccl"], "--against"),
        (["--ranks", "0"], "--ranks"),
        (["--ranks", "2", "--hosts", "3"], "--hosts must lie in [1, 2]"),
        (["--limit", "0"], "--limit"),
        (["--secnds", "3"], "did you mean --seconds?"),
    ],
)
def test_a_mistake_in_the_command_line_is_refused(flags, said, capsys):
    assert main(flags) == 2
    assert said in capsys.readouterr().err
