"""The usual mistakes, one for each attempt of a job of two ranks; the tests read what each has left in the logs."""

import dataclasses
import os
import signal
import sys
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

import phalanx
from phalanx.rendezvous.launched import note_progress

RANK = int(os.environ.get("RANK", "0"))
ones = torch.ones


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.used(x)


class Lambdas(Dataset):
    def __init__(self):
        self.transform = lambda x: x

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {}["image"]


class Killed(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)


@dataclasses.dataclass
class Settings:
    rate: float

    def __post_init__(self):
        if not self.rate:
            raise ValueError("rate must be more than 0")


def init(backend="phalanx"):
    dist.init_process_group(backend)


def raise_everywhere():
    init()
    raise ValueError("bad learning rate")


def fail_on_one_rank():
    init()
    if RANK == 1:
        ones(3) @ ones(4)
    dist.barrier()


def give_a_wrong_list():
    init()
    dist.all_gather([ones(3)] * 3, ones(3))


def name_a_wrong_root():
    init()
    dist.broadcast(ones(3), src=9)


def give_other_sizes():
    init()
    dist.all_reduce(ones(3 + RANK))


def call_other_collectives():
    init()
    dist.all_reduce(ones(3)) if RANK else dist.barrier()


def give_a_negative_timeout():
    dist.init_process_group("phalanx", timeout=timedelta(seconds=-5))


def be_killed():
    init()
    if RANK:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def receive_another_size():
    init()
    dist.recv(ones(8), 0) if RANK else dist.send(ones(4), 1)
    dist.barrier()


def name_device_ids_on_a_cpu():
    init()
    DistributedDataParallel(Net(), device_ids=[RANK])


def name_device_ids_to_ours():
    init()
    phalanx.DistributedDataParallel(Net(), device_ids=[RANK])


def use_torchs_syncbatchnorm():
    init()
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    DistributedDataParallel(torch.nn.SyncBatchNorm.convert_sync_batchnorm(model))


def use_nccl():
    init("nccl")


def name_an_unknown_backend():
    init("foo")


def set_a_gpu():
    torch.cuda.set_device(RANK)


def move_to_a_gpu():
    torch.nn.Linear(3, 3).cuda()


def have_fewer_batches():
    init()
    model = DistributedDataParallel(torch.nn.Linear(3, 3))
    for _ in range(3 + RANK):
        model(ones(4, 3)).sum().backward()
    print("done", flush=True)


def read_input():
    if RANK:
        input("learning rate? ")
    time.sleep(60)


def stop_at_a_breakpoint():
    if RANK:
        breakpoint()
    time.sleep(60)


def name_an_empty_world():
    dist.init_process_group("phalanx", rank=0, world_size=0)


def import_what_is_missing():
    import no_such_package  # noqa: F401


def pickle_a_lambda():
    for _ in DataLoader(Lambdas(), num_workers=1, multiprocessing_context="spawn"):
        pass


def fail_in_a_worker():
    for _ in DataLoader(Lambdas(), num_workers=1):
        pass


def reduce_float8():
    init()
    dist.all_reduce(ones(3).to(torch.float8_e4m3fn))


def load_a_wrapped_state():
    net = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(9)))
    net.load_state_dict({f"module.{name}": value for name, value in net.state_dict().items()})


def be_late():
    dist.init_process_group("phalanx", timeout=timedelta(seconds=0.3))
    if RANK == 0:
        dist.barrier()
    time.sleep(60)


def leave_parameters_unused():
    init()
    model = DistributedDataParallel(Net())
    for _ in range(2):
        model(ones(2, 3)).sum().backward()


def forget_to_init():
    dist.all_reduce(ones(3))


def fill_the_memory():
    torch.empty(1 << 48)


def give_gloo_other_sizes():
    init("gloo")
    dist.all_reduce(ones(3 + 100 * RANK))
    dist.barrier()


def call_on_one_rank():
    init()
    if RANK == 0:
        dist.all_reduce(ones(3))


def call_gloo_on_one_rank():
    init("gloo")
    if RANK == 0:
        dist.all_reduce(ones(3))


def name_a_gpu_to_init():
    phalanx.init(device="cuda:0")


def lose_a_worker():
    for _ in DataLoader(Killed(), num_workers=1):
        pass


def fail_in_generated_code():
    Settings(rate=0)


def train_to_nan():
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=float("nan"))
    data = TensorDataset(ones(8, 3), ones(8, 1))
    loss = torch.nn.functional.mse_loss
    phalanx.Trainer(model, optimizer, loss, max_epochs=3, global_batch_size=4, folder="nan").fit(data)


def exit_with_words():
    sys.exit("bad configuration" if RANK else 0)


MISTAKES = [value for value in list(globals().values()) if getattr(value, "__module__", "") == __name__]
MISTAKES = [value for value in MISTAKES if not isinstance(value, type) and value is not init]

if __name__ == "__main__":
    note_progress(os.environ["PHALANX_LAUNCH"])  # or a mistake that all ranks make is the last
    warnings.warn("printed by all ranks", stacklevel=1)
    MISTAKES[int(os.environ["TORCHELASTIC_RESTART_COUNT"])]()
