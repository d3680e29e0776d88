"""Random programs on phalanx give what Gloo and arithmetic give. What follows from a seed is the same in every run."""

from __future__ import annotations

import random

import pytest

from phalanx.testing.fuzz import mpi
from phalanx.testing.fuzz.command import main
from phalanx.testing.fuzz.program import GroupPlan, Program, Step, as_source, draw_place, draw_program


def fuzz(*flags):
    """Run the fuzzer in this process; a fault shows on the test's own output."""
    return main(["--shrink", "0", "--limit", "60", *flags])


@pytest.mark.parametrize(("ranks", "programs"), [("1", "1"), ("2", "3"), ("3", "3"), ("4", "2"), ("6", "1")])
def test_random_programs_give_what_gloo_gives(ranks, programs, tmp_path):
    assert fuzz("--seed", ranks, "--programs", programs, "--ranks", ranks, "--hosts", "1", "--out", str(tmp_path)) == 0


@pytest.mark.parametrize(("ranks", "hosts"), [("2", "2"), ("3", "2"), ("4", "2"), ("3", "3")])
def test_random_programs_on_several_hosts_give_what_gloo_gives(ranks, hosts, tmp_path):
    assert fuzz("--seed", "7", "--programs", "1", "--ranks", ranks, "--hosts", hosts, "--out", str(tmp_path)) == 0


def test_random_programs_give_what_mpi_gives(tmp_path):
    if missing := mpi.why_not():
        pytest.skip(missing)
    assert fuzz("--seed", "5", "--programs", "2", "--ranks", "3", "--against", "mpi", "--out", str(tmp_path)) == 0


def test_without_mpi_it_is_refused_as_a_judge(monkeypatch, capsys):
    monkeypatch.setattr(mpi, "mpirun", lambda: None)
    assert main(["--against", "mpi"]) == 2
    assert "--against mpi: no mpirun here: pip install mpi4py" in capsys.readouterr().err


@pytest.mark.slow
def test_random_programs_of_a_new_seed_give_what_gloo_gives(tmp_path):
    assert fuzz("--seconds", "600", "--out", str(tmp_path)) == 0


def draw(seed):
    source = random.Random(seed)
    return draw_program(source, draw_place(source, (5,), None), 30)


def test_a_seed_is_a_program():
    programs = [draw(seed) for seed in range(20)]
    assert programs == [draw(seed) for seed in range(20)]
    assert len({as_source(program) for program in programs}) == 20


def test_the_source_of_a_program_is_the_program():
    for program in map(draw, range(20)):
        assert eval(as_source(program), {"Program": Program, "GroupPlan": GroupPlan, "Step": Step}) == program


def test_programs_have_every_kind_of_call_group_and_memory():
    steps = [step for program in map(draw, range(100)) for step in program.steps]
    plans = {plan.how for program in map(draw, range(100)) for plan in program.groups}
    assert {"world", "new", "local"} <= plans
    assert {step.name for step in steps} >= {"all_reduce", "messages", "flood", "all_gather_uneven", "gather_object"}
    assert {step.source_layout for step in steps} == {"plain", "offset", "strided", "transposed", "misaligned"}
    assert {step.reduce_op for step in steps if step.is_reduction} >= {"SUM", "AVG", "BXOR", "PREMUL_SUM"}
    assert any(step.async_op and step.lag > 2 for step in steps)
    assert any(step.shape[0] == 0 for step in steps)
