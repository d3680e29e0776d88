"""Training on ranks of two hosts is what it is on one: torch's wrappers, ours, optimizers and checkpoints."""

from __future__ import annotations

import pytest
import torch

from tests.integration._compare import whole
from tests.integration.test_torch_checkpoint import save_and_load as save_and_load_dcp
from tests.integration.test_torch_ddp import train as train_ddp
from tests.integration.test_torch_sharding import train_fsdp2, train_hsdp, train_tensor_parallel, train_zero
from tests.parallel.test_zero import CASES, save_and_load, step_all_cases
from tests.train.test_trainer import run_programs

pytestmark = pytest.mark.kept_ranks

TRAINED = [
    "train_plainly",
    "train_with_torchs_ddp",
    "train_with_fsdp",
    "resume_in_mid_epoch",
    "train_the_same_anywhere",
]
DDP_KINDS = ["plain", "find_unused", "bucket_view", "fp16_compress", "power_sgd", "no_sync"]


def train_with_everything(rank, world_size, folder):
    # Not the weights: Adam makes steps of what rounding leaves of gradients that are 0, those before the batch norm.
    results = {f"ddp {kind}": train_ddp(rank, world_size, kind)[1:] for kind in DDP_KINDS}
    results |= {f"fsdp2 {kind}": train_fsdp2(rank, world_size, kind) for kind in ("plain", "mixed_precision")}
    results["hsdp"] = train_hsdp(rank, world_size)
    results["tensor parallel"] = train_tensor_parallel(rank, world_size)
    results["zero"] = train_zero(rank, world_size)
    for kind in ("ddp", "fsdp2"):
        saved, _, loaded = save_and_load_dcp(rank, world_size, folder, "save", kind)
        results[f"saved {kind}"], results[f"loaded {kind}"] = saved, loaded
    results["trainer"] = run_programs(rank, world_size, folder, TRAINED)
    return whole(results)


@pytest.fixture(scope="module")
def results(run_ranks, tmp_path_factory):
    """What four ranks return on two hosts, and what they return on one."""
    return [
        run_ranks(train_with_everything, 4, str(tmp_path_factory.mktemp("trained")), hosts=hosts, timeout_s=100)
        for hosts in ([2, 2], [])
    ]


def assert_alike(ours, theirs, where, tolerance=1e-4):
    if isinstance(ours, torch.Tensor):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, msg=lambda text: f"{where}: {text}")
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for key, value in ours.items():
            assert_alike(value, theirs[key], f"{where} {key}", tolerance)
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs), where
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_alike(one, other, f"{where}[{i}]", tolerance)
    elif isinstance(ours, float):
        assert ours == pytest.approx(theirs, rel=tolerance), where
    elif not isinstance(ours, str):  # what was printed, which has times in it
        assert ours == theirs, where


LOOSE = dict.fromkeys([f"ddp {kind}" for kind in DDP_KINDS], 2e-3)
LOOSE |= {"ddp fp16_compress": 2e-2, "ddp power_sgd": 2e-2, "fsdp2 mixed_precision": 5e-2}


@pytest.mark.parametrize(
    "name",
    [*(f"ddp {kind}" for kind in DDP_KINDS), "fsdp2 plain", "fsdp2 mixed_precision", "hsdp", "tensor parallel", "zero"],
)
def test_torchs_ways_to_train_do_the_same_on_two_hosts(results, name):
    two_hosts, one_host = results
    for rank in range(4):
        assert_alike(two_hosts[rank][name], one_host[rank][name], f"{name}, rank {rank}", LOOSE.get(name, 1e-4))


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_distributed_checkpoint_loads_what_was_saved(results, kind):
    for of_rank in results[0]:
        assert_alike(of_rank[f"loaded {kind}"], of_rank[f"saved {kind}"], kind, 0.0)


@pytest.mark.parametrize("program", TRAINED)
def test_the_trainer_does_the_same_on_two_hosts(results, program):
    two_hosts, one_host = results
    for rank in range(4):
        assert_alike(two_hosts[rank]["trainer"][program], one_host[rank]["trainer"][program], f"{program}, rank {rank}")


@pytest.mark.parametrize("program", ["train_plainly", "train_with_torchs_ddp", "train_the_same_anywhere"])
def test_the_weights_have_the_same_bits_on_every_rank(results, program):
    states = [of_rank["trainer"][program] for of_rank in results[0]]
    states = [state[0] if program == "train_plainly" else state for state in states]
    for state in states[1:]:
        assert all(torch.equal(value, states[0][name]) for name, value in state.items())


@pytest.mark.parametrize("hosts", [[1, 1], [2, 1]], ids=["1+1", "2+1"])
def test_the_sharded_optimizer_steps_to_the_bits_of_the_plain_one(run_ranks, hosts):
    results = run_ranks(step_all_cases, sum(hosts), False, hosts=hosts)
    for case in CASES:
        assert all(result[case][0] for result in results), case


def test_its_state_resumes_on_other_hosts(run_ranks, tmp_path):
    layouts = [[2, 2], [1, 2], [1, 1]]
    for part, hosts in enumerate(layouts):
        results = run_ranks(save_and_load, sum(hosts), str(tmp_path), hosts=hosts)
        for parameters in results:
            assert all(torch.equal(p, q) for p, q in zip(results[0], parameters, strict=True)), part
