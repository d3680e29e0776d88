"""DeepSpeed's ZeRO-1 or 2 on a CPU, with torch's own Adam: nothing is compiled."""

import sys

import deepspeed
import torch
import torch.distributed as dist
from _told import model, samples, tell

deepspeed.init_distributed(dist_backend="gloo")
net = model()
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_optimization": {"stage": int(sys.argv[1])},
    "zero_allow_untested_optimizer": True,
}
engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
mine = samples()[dist.get_rank() :: dist.get_world_size()]
for inputs, targets in torch.utils.data.DataLoader(mine, batch_size=4):
    loss = torch.nn.functional.cross_entropy(engine(inputs), targets)
    engine.backward(loss)
    engine.step()
tell(engine.module, loss=loss.item())
dist.destroy_process_group()
