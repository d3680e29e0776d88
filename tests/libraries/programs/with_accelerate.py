"""Accelerate's usual loop."""

import torch
from _told import model, samples, tell
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
net = model()
loader = torch.utils.data.DataLoader(samples(), batch_size=4)
net, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
seen = 0
for _ in range(2):
    for inputs, targets in loader:
        with accelerator.accumulate(net):
            loss = torch.nn.functional.cross_entropy(net(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        seen += len(accelerator.gather_for_metrics(targets))
accelerator.wait_for_everyone()
tell(accelerator.unwrap_model(net), seen=seen)
accelerator.end_training()
