"""One GPU: what a rank trains on it, and what two ranks that share it are told or get."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from tests.launch.jobs import LIMIT_S, PHALANX_RUN, run_job, write_script

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TRAINS = """
import torch.nn.functional as F
import torch, phalanx
phalanx.seed_everything(0)
x = torch.randn(512, 32, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 2))

class Dies:
    def on_step(self, trainer):
        if sys.argv[2] == "dies" and trainer.step == 20 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

trainer = phalanx.Trainer(
    model, torch.optim.AdamW(model.parameters(), 1e-3), F.cross_entropy, max_epochs=3, global_batch_size=32,
    precision=sys.argv[1], folder=f"{sys.argv[1]}-{sys.argv[2]}", callbacks=[Dies()],
)
trainer.fit(data)
weights = torch.cat([p.detach().flatten() for p in model.parameters()])
print("weights", weights.device, weights.double().sum().item().hex(), weights.double().abs().sum().item().hex())
"""


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_killed_rank_trains_to_the_same_bits(tmp_path, precision):
    script, said = write_script(tmp_path, TRAINS), []
    for how in ("lives", "dies"):
        command = [*PHALANX_RUN, "--nproc-per-node", "1", "--max-restarts", "1", script, precision, how]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.partition("weights ")[2])
        assert ("restart 1 of 1" in done.stderr) == (how == "dies")
    assert said[0].startswith("cuda:0 ")
    assert said[0] == said[1]


def sum_on_the_gpu(rank, world_size, backend):
    import phalanx

    if backend == "replaced":
        phalanx.replace_gloo()
    dist.init_process_group("gloo" if backend == "replaced" else backend)
    summed, gathered = torch.full((3,), rank + 1.0, device="cuda"), [None] * world_size
    dist.all_reduce(summed)
    dist.all_gather_object(gathered, torch.full((2,), rank, device="cuda"))
    model = torch.nn.Linear(4, 2).cuda()
    torch.nn.init.ones_(model.weight)
    ddp = phalanx.DistributedDataParallel(model)
    ddp(torch.full((2, 4), rank + 1.0, device="cuda")).sum().backward()
    results = [summed, model.weight.grad, *gathered]
    return [str(result.device) for result in results], [result.tolist() for result in results]


@pytest.mark.parametrize(("backend", "world_size"), [("cpu:phalanx,cuda:nccl", 1), ("replaced", 2), ("gloo", 2)])
def test_collectives_and_gradients_on_the_gpu(run_ranks, backend, world_size):
    mean = sum(range(1, world_size + 1)) / world_size * 2
    for devices, (summed, grad, *gathered) in run_ranks(sum_on_the_gpu, world_size, backend, init=False):
        assert devices == ["cuda:0"] * (2 + world_size)
        assert summed == [float(sum(range(1, world_size + 1)))] * 3
        assert grad == [[mean] * 4] * 2
        assert gathered == [[rank] * 2 for rank in range(world_size)]


SAVES = """
import torch, phalanx
from phalanx import checkpoint
with phalanx.init() as session:
    model = torch.nn.Linear(64, 64).to(session.device)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 64, device=session.device)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "number": torch.arange(4, device=session.device)}
    checkpoint.save("folder", state, step=1)
    wanted = [model.weight.detach().clone(), optimizer.state[model.weight]["exp_avg"].clone(), state["number"].clone()]
    with torch.no_grad():
        for tensor in (model.weight, optimizer.state[model.weight]["exp_avg"], state["number"]):
            tensor.zero_()
    checkpoint.load("folder", state)
    found = [model.weight, optimizer.state[model.weight]["exp_avg"], state["number"]]
    print(all(torch.equal(a, b) for a, b in zip(wanted, found)), {str(tensor.device) for tensor in found})
"""


def test_a_checkpoint_comes_back_to_the_gpu(tmp_path):
    done = run_job(tmp_path, SAVES, num_ranks=1)
    assert "True {'cuda:0'}" in done.stdout, done.stderr


SUMS = """
import torch, torch.distributed as dist, phalanx
dist.all_reduce(torch.ones(1, device=phalanx.init().device))
"""


def test_two_ranks_on_one_gpu_are_told(tmp_path):
    if len([name for name in os.listdir("/dev") if name.removeprefix("nvidia").isdigit()]) > 1:
        pytest.skip("needs a machine with one GPU")
    done = run_job(tmp_path, SUMS)
    assert done.returncode == 1
    assert "hint: two ranks use one GPU: --nproc-per-node gpu" in done.stderr


def test_doctor_measures_nccl():
    done = subprocess.run([sys.executable, "-m", "phalanx", "doctor"], capture_output=True, text=True, timeout=LIMIT_S)
    assert "nccl: 1 MiB on 1 local rank in " in done.stdout, done.stdout + done.stderr
