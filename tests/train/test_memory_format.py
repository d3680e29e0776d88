"""`channels_last` changes where weights and images lie in memory, and nothing of what is learnt, saved or resumed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import phalanx
from phalanx.parallel.ddp.buckets import CoalescedBucket
from phalanx.train.step.memory_format import lay_out_batch
from tests.train._programs import quietly


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.ReLU(),
        nn.Flatten(), nn.Linear(4 * 36, 2),
    )  # fmt: skip


def make_images(length=24):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(length, 3, 8, 8, generator=generator)
    return torch.utils.data.TensorDataset(images, (images.mean((1, 2, 3)) > 0).long())


class Formats:
    """Notes how the images of the model's inputs lie in memory."""

    def __init__(self, model):
        self.are_last = []
        model[0].register_forward_pre_hook(lambda _, inputs: self.are_last.append(_is_last(inputs[0])))


def _is_last(tensor):
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def fit(folder, *, lr=0.01, **settings):
    torch.set_num_threads(1)
    model = make_model()
    formats = Formats(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    trainer = phalanx.Trainer(
        model, optimizer, nn.functional.cross_entropy, folder=folder,
        **{"global_batch_size": 6, "max_steps": 8, "channels_last": True, **settings},
    )  # fmt: skip
    quietly(trainer.fit, make_images(), make_images(5))
    return trainer, formats


def bits_of(trainer):
    state = trainer.optimizer.state_dict()["state"]
    values = {f"{index}.{name}": value for index, of in state.items() for name, value in of.items()}
    return {**trainer.module.state_dict(), **values}


def differing(one, other):
    return [name for name in one if not torch.equal(one[name], other[name])]


def train_in_parts(rank, world_size, folder):
    whole, formats = fit(f"{folder}/whole")
    assert all(formats.are_last)
    assert _is_last(whole.module[0].weight)
    fit(f"{folder}/parts", max_steps=3)
    parts, _ = fit(f"{folder}/parts")
    averages = [trainer.optimizer.state[trainer.module[0].weight]["exp_avg"] for trainer in (whole, parts)]
    assert [_is_last(average) for average in averages] == [True, True]
    plain, formats = fit(f"{folder}/plain", channels_last=False)
    assert not any(formats.are_last)
    return differing(bits_of(whole), bits_of(parts)), whole.evaluation["loss"] - plain.evaluation["loss"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_in_parts_has_the_bits_of_a_whole_one_and_learns_what_one_without_does(run_ranks, tmp_path, world_size):
    for different, more in run_ranks(train_in_parts, world_size, str(tmp_path), timeout_s=60):
        assert different == []
        assert more == pytest.approx(0, abs=0.01)


def resume_in_the_other_layout(rank, world_size, folder):
    saved, _ = fit(f"{folder}/run", max_steps=3)
    kept = {name: value.clone() for name, value in bits_of(saved).items()}
    taken_up, _ = fit(f"{folder}/run", max_steps=3, channels_last=False)
    return differing(kept, bits_of(taken_up)), _is_last(taken_up.module[0].weight)


def test_a_checkpoint_is_the_same_in_either_layout(run_ranks, tmp_path):
    assert run_ranks(resume_in_the_other_layout, 2, str(tmp_path), timeout_s=60) == [([], False)] * 2


def average(rank, world_size):
    model = make_model().to(memory_format=torch.channels_last)
    ddp = phalanx.DistributedDataParallel(model)
    averaged = []
    average_where_they_lie = CoalescedBucket.wait

    def wait(bucket):
        averaged.extend(tensor.data_ptr() for tensor in bucket._tensors if tensor.is_contiguous())
        average_where_they_lie(bucket)

    CoalescedBucket.wait = wait
    ddp(make_images().tensors[0].contiguous(memory_format=torch.channels_last)).sum().backward()
    return sorted(averaged) == sorted(p.grad.data_ptr() for p in model.parameters())


def test_gradients_are_averaged_where_they_lie(run_ranks):
    assert run_ranks(average, 2, timeout_s=60) == [True, True]


def test_a_model_that_is_wrapped_already_is_refused():
    model = nn.DataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="channels_last lays out the model's weights"):
        phalanx.Trainer(model, optimizer, nn.functional.cross_entropy, max_steps=1, channels_last=True)


class Mixed(nn.Module):
    """Convolutions of one, two and three dimensions, with a weight and a buffer of four that no image is."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.three = nn.Conv1d(3, 4, 3), nn.Conv2d(3, 4, 3), nn.Conv3d(3, 4, 3)
        self.scale = nn.Parameter(torch.ones(1, 4, 1, 1))
        self.register_buffer("mask", torch.ones(2, 3, 8, 8, dtype=torch.bool))
        self.last = nn.Linear(12, 2)

    def forward(self, batch):
        sound, image, video = batch
        parts = self.one(sound).mean(2), (self.two(image) * self.scale).mean((2, 3)), self.three(video).mean((2, 3, 4))
        return self.last(torch.cat(parts, 1))


def fit_mixed(rank, world_size, folder):
    torch.set_num_threads(1)
    found = []
    for channels_last in (False, True):
        model = Mixed()
        layouts = []

        def step(model, batch, layouts=layouts):
            layouts.append([_is_last(tensor) for tensor in batch[:3]])
            return nn.functional.cross_entropy(model(batch[:3]), batch[3])

        trainer = phalanx.Trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.1), training_step=step, folder=f"{folder}/{channels_last}",
            global_batch_size=4, max_steps=4, channels_last=channels_last,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(1)
        shapes = ((3, 8), (3, 8, 8), (3, 8, 8, 8))
        tensors = [torch.randn(8, *shape, generator=generator) for shape in shapes]
        quietly(trainer.fit, torch.utils.data.TensorDataset(*tensors, torch.arange(8) % 2))
        assert layouts == [[False, channels_last, False]] * 4
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    return [name for name in found[0] if not torch.allclose(found[0][name], found[1][name], atol=1e-5)]


def test_tensors_of_other_dimensions_stay_as_they_are(run_ranks, tmp_path):
    assert run_ranks(fit_mixed, 2, str(tmp_path), timeout_s=60) == [[], []]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, 3, 4, 5).to_sparse(), torch.ones(2, 3, 4, 5, dtype=torch.uint8),
        torch.nested.nested_tensor([torch.ones(3, 4, 5), torch.ones(3, 2, 5)], layout=torch.jagged),
        torch.ones(2, 3, 4, 5, dtype=torch.complex64),
    ],
    ids=["sparse", "bytes", "nested", "complex"],
)  # fmt: skip
def test_tensors_that_are_no_dense_images_stay_as_they_are(tensor):
    assert lay_out_batch([tensor])[0] is tensor
