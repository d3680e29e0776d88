"""Ray Train's TorchTrainer with two workers on this machine."""

import os
import tempfile

import ray
import ray.train.torch
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train(folder):
    import sys

    sys.path.insert(0, folder)
    from _told import model, samples, tell

    net = ray.train.torch.prepare_model(model())
    loader = ray.train.torch.prepare_data_loader(torch.utils.data.DataLoader(samples(), batch_size=4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(inputs), targets)
            loss.backward()
            optimizer.step()
        ray.train.report({"loss": loss.item()})
    tell(net)


if __name__ == "__main__":
    given = {name: os.environ[name] for name in ("OUT", "PHALANX_REPLACE") if name in os.environ}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=True, runtime_env={"env_vars": given})
    with tempfile.TemporaryDirectory() as folder:
        TorchTrainer(
            train,
            train_loop_config=os.path.dirname(os.path.abspath(__file__)),
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder),
        ).fit()
    ray.shutdown()
