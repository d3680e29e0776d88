"""Copies that differ are found while a Trainer trains, named on every rank, and never where they do not differ."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import phalanx
from tests.train._flips import QUIET, flip_until, train_quietly
from tests.train._programs import make_data, make_model, quietly


def found(outcomes: list[list[str]], num_lasting: int) -> None:
    """Check that every flip was found unless it healed first, the same on all ranks."""
    assert outcomes[1:] == outcomes[:1] * (len(outcomes) - 1)
    told = Counter(outcomes[0])
    print(f"of {sum(told.values())} flips: {dict(told)}")
    assert [one for one in told if one != "found" and not one.startswith("healed")] == []
    assert told["found"] == num_lasting


def test_a_flipped_bit_is_found_within_the_interval(run_ranks, tmp_path):
    found(run_ranks(flip_until, 3, str(tmp_path), 8, timeout_s=360), 8)


@pytest.mark.slow
def test_a_hundred_flipped_bits_are_found_within_the_interval(run_ranks, tmp_path):
    found(run_ranks(flip_until, 3, str(tmp_path), 100, timeout_s=600), 100)


def quiet_steps(run_ranks, tmp_path, num_steps):
    every = run_ranks(train_quietly, 2, str(tmp_path), num_steps, timeout_s=600)
    assert every == [dict.fromkeys(QUIET, math.ceil(num_steps / len(QUIET)))] * 2


def test_trainings_whose_copies_are_alike_raise_no_alarm(run_ranks, tmp_path):
    quiet_steps(run_ranks, tmp_path, 30 * len(QUIET))


@pytest.mark.slow
def test_ten_thousand_steps_raise_no_alarm(run_ranks, tmp_path):
    quiet_steps(run_ranks, tmp_path, 10_000)


class Nudge:
    """Changes rank 1's copy after a step."""

    def __init__(self, step):
        self._step = step

    def on_step(self, trainer):
        if trainer.step == self._step and trainer.session.rank == 1:
            with torch.no_grad():
                trainer.module[4].bias += 1


def nudge(rank, world_size, folder, settings):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"max_steps": 30, "global_batch_size": 8, "callbacks": [Nudge(7)], "folder": folder, **settings}
    trainer = phalanx.Trainer(model, optimizer, nn.functional.mse_loss, **options)
    try:
        quietly(trainer.fit, make_data())
    except phalanx.ReplicaMismatch as error:
        return str(error), error.step, error.since_step, error.ranks, error.tensors, error.how
    return None


def test_of_two_ranks_both_are_named_and_the_report_tells(run_ranks, tmp_path):
    every = run_ranks(nudge, 2, str(tmp_path), {"compare_every": 5})
    assert every == [every[0]] * 2
    message, step, since, ranks, tensors, how = every[0]
    assert since < 7 <= step <= 12
    assert (ranks, tensors, how) == ((0, 1), ("parameter '4.bias'",), "value")
    assert f"step {step}: the ranks' copies differ: parameter '4.bias' at [0] is " in message
    assert f"They diverged in one of the steps {since + 1} to {step}" in message
    assert message.endswith("(phalanx explain replica-mismatch)")
    records = [json.loads(line) for line in Path(tmp_path, "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["kind"] == "replicas_differ"
    assert records[-1]["tensors"] == ["parameter '4.bias'"]
    assert "It was stopped" in Path(tmp_path, "report.html").read_text()


def test_it_compares_all_copies_in_each_step_if_asked_to(run_ranks, tmp_path):
    for _, step, since, *_ in run_ranks(nudge, 3, str(tmp_path), {"compare_every": 1}):
        assert (step, since) == (7, 6)


def test_it_can_be_turned_off(run_ranks, tmp_path):
    assert run_ranks(nudge, 2, str(tmp_path), {"compare_every": 0}) == [None, None]


def rounds_otherwise(rank, world_size, folder):
    torch.set_num_threads(1 + rank)
    model = make_model()
    options = {"max_steps": 9, "callbacks": [Nudge(2)], "folder": folder, "compare_every": 1}
    trainer = phalanx.Trainer(model, torch.optim.SGD(model.parameters()), nn.functional.mse_loss, **options)
    return quietly(trainer.fit, make_data())[1]


def test_ranks_that_round_otherwise_are_not_compared_and_told_so(run_ranks, tmp_path):
    said = run_ranks(rounds_otherwise, 2, str(tmp_path))[0]
    assert "the ranks' copies are not compared: their processors round differently (" in said
    assert "with 1 thread" in said
    assert "with 2 threads" in said
