"""torch's pipelines: every schedule, with one stage a rank and with several, gives Gloo's bits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from phalanx import _torch
from tests.integration._compare import Comparison

WIDTH, NUM_MICROBATCHES, NUM_STEPS = 8, 4, 3
ONE_STAGE = ("ScheduleGPipe", "Schedule1F1B")
TWO_STAGES = ("ScheduleLoopedBFS", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")  # rank 0 has the first and the last stage
SCHEDULES = (*ONE_STAGE, *TWO_STAGES, *V_SHAPED)


def layers():
    torch.manual_seed(4)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]


def batch(step):
    random = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=random), torch.randn(8, WIDTH, generator=random)


def undivided():
    """Train without a pipeline: losses by microbatch, and the weights."""
    net = nn.Sequential(*layers())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(NUM_STEPS):
        inputs, target = (whole.chunk(NUM_MICROBATCHES) for whole in batch(step))
        optimizer.zero_grad()
        for one, other in zip(inputs, target, strict=True):
            loss = nn.functional.mse_loss(net(one), other)
            (loss / NUM_MICROBATCHES).backward()
            losses.append(loss.detach())
        optimizer.step()
    return losses, [layer.state_dict() for layer in net]


def stages_of(kind, rank):
    """Return the layers of each stage that this rank has, by the stage's number, and the number of stages."""
    all_layers = layers()
    if kind in ONE_STAGE:
        return {rank: nn.Sequential(*all_layers[2 * rank : 2 * rank + 2])}, 2
    numbers = (rank, 3 - rank) if kind in V_SHAPED else (rank, rank + 2)
    return {number: all_layers[number] for number in numbers}, 4


def train(rank, world_size, kind):
    from torch.distributed import pipelining

    held, num_stages = stages_of(kind, rank)
    stages = [
        pipelining.PipelineStage(module, number, num_stages, torch.device("cpu")) for number, module in held.items()
    ]
    schedule = getattr(pipelining, kind)(
        stages[0] if kind in ONE_STAGE else stages, NUM_MICROBATCHES, loss_fn=nn.functional.mse_loss
    )
    optimizer = torch.optim.SGD([p for module in held.values() for p in module.parameters()], lr=0.1)
    has_first, has_last = 0 in held, num_stages - 1 in held
    losses: list[torch.Tensor] = []
    for step in range(NUM_STEPS):
        inputs, target = batch(step)
        of_step: list[torch.Tensor] = []
        optimizer.zero_grad()
        schedule.step(*([inputs] if has_first else []), **({"target": target, "losses": of_step} if has_last else {}))
        optimizer.step()
        losses += of_step
    outputs = None
    if kind in ONE_STAGE:  # the others of torch 2.15 evaluate nothing
        outputs = schedule.eval(*([batch(9)[0]] if has_first else []), **({"target": batch(9)[1]} if has_last else {}))
    return losses, outputs, {number: module.state_dict() for number, module in held.items()}


def train_traced(rank, world_size):
    """The pipeline that torch cuts out of a whole model."""
    from torch.distributed import pipelining

    net = nn.Sequential(*layers())
    pipe = pipelining.pipeline(
        net, mb_args=(batch(0)[0].chunk(NUM_MICROBATCHES)[0],), split_spec={"2": pipelining.SplitPoint.BEGINNING}
    )
    stage = pipe.build_stage(rank, torch.device("cpu"), dist.group.WORLD)
    schedule = pipelining.Schedule1F1B(stage, NUM_MICROBATCHES, loss_fn=nn.functional.mse_loss)
    losses: list[torch.Tensor] = []
    inputs, target = batch(0)
    schedule.step(*([inputs] if rank == 0 else []), **({} if rank == 0 else {"target": target, "losses": losses}))
    return losses, [parameter.grad for parameter in stage.submod.parameters()]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    programs = {kind: (train, (kind,)) for kind in SCHEDULES} | {"traced": (train_traced, ())}
    # Until torch 2.12, the rank of two stages that follow each other sends to itself, which Gloo can't.
    beyond_gloo = V_SHAPED if _torch.version() < (2, 12) else ()
    return Comparison(2, tmp_path_factory.mktemp("pipelining"), programs, beyond_gloo)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_trains_to_gloos_bits_and_as_without_a_pipeline(comparison, kind):
    results = comparison.same_on_gloo(kind)
    wanted_losses, wanted = undivided()
    [losses] = [losses for losses, _, _ in results if losses]
    torch.testing.assert_close(torch.stack(losses), torch.stack(wanted_losses))
    for _, _, held in results:
        for number, state in held.items():
            found = [*state.values()]
            first = 2 * number if kind in ONE_STAGE else number
            expected = [value for layer in wanted[first : first + len(found) // 2] for value in layer.values()]
            torch.testing.assert_close(found, expected)


def test_a_traced_pipeline_trains_to_gloos_bits(comparison):
    (none, first), (losses, second) = comparison.same_on_gloo("traced")
    assert none == []
    torch.testing.assert_close(torch.stack(losses), torch.stack(undivided()[0][:NUM_MICROBATCHES]))
    assert len(first) == len(second) == 4
