"""Hold a dataset once for all ranks and workers of a host, and find it there after a restart.

Start it with any number of ranks:

    phalanx run --nproc-per-node 2 examples/shared_data.py
    phalanx run --nproc-per-node 2 --max-restarts 1 examples/shared_data.py --kill
    torchrun --nproc-per-node 2 examples/shared_data.py
    python examples/shared_data.py                                     # a world of one
"""

import argparse
import os
import time

import torch
from torch.utils.data import Dataset

import phalanx


class Sentences(Dataset):
    """A dataset with a list of records and a tensor. Each access adds noise, which is not shared."""

    def __init__(self, num_samples):
        time.sleep(2)  # in place of a download and a tokenizer
        print("built the dataset", flush=True)
        self.records = [{"number": number, "text": f"sentence {number}"} for number in range(num_samples)]
        self.features = torch.randn(num_samples, 64)

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        return self.records[index]["number"], self.features[index] + 0.1 * torch.randn(64)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-samples", type=int, default=10_000)
    parser.add_argument("--kill", action="store_true", help="kill rank 0 once, to see the restart")
    args = parser.parse_args()

    session = phalanx.init()
    began = time.monotonic()
    dataset = phalanx.share(lambda: Sentences(args.num_samples), key="sentences")
    if session.rank == 0:
        print(f"the dataset is there after {time.monotonic() - began:.1f} s", flush=True)

    loader = phalanx.DataLoader(dataset, batch_size=100, shuffle=True, num_workers=1)
    num_samples = sum(len(numbers) for numbers, _ in loader)
    print(f"rank {session.rank} has read {num_samples} samples", flush=True)

    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if args.kill and is_first and session.rank == 0:
        os.kill(os.getpid(), 9)
    phalanx.shutdown()


if __name__ == "__main__":
    main()
