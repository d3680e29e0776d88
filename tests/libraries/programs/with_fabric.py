"""Lightning's Fabric."""

import torch
from _told import model, samples, tell
from lightning.fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
net = model()
net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(samples(), batch_size=4))
for _ in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
tell(net, loss=float(fabric.all_reduce(loss.detach())))
