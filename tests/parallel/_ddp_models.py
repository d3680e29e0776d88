"""The models of `test_ddp_models`, each with a loss and the steps of its training."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

BATCH = 4


def numbers(step: int, rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(shape or (BATCH, 6), generator=generator, dtype=torch.float64).to(dtype)


def tokens(step: int, rank: int) -> torch.Tensor:
    return torch.randint(10, (BATCH, 5), generator=torch.Generator().manual_seed(1000 * step + rank))


def mean_square(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(numbers(step, rank)).square().mean()


def mean_square_of_tokens(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(tokens(step, rank)).square().mean()


def nothing(module: nn.Module, step: int) -> None:
    pass


@dataclasses.dataclass(eq=False)
class Case:
    """A model and what is done with it.

    Attributes:
        build: Makes the model.
        loss: ``loss(model, step, rank)``; the batch of the step is what all ranks have together.
        torch_options: For torch's DistributedDataParallel, None if it cannot train this.
        before_step: Changes the module at a step.
        rtol: Relative to the largest gradient.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[Any, int, int], torch.Tensor] = mean_square
    torch_options: dict[str, Any] | None = dataclasses.field(default_factory=dict)
    before_step: Callable[[nn.Module, int], None] = nothing
    rtol: float = 1e-5


UNUSED = {"find_unused_parameters": True}
CASES: dict[str, Case] = {}


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


CASES["an MLP"] = Case(mlp)


class Tied(nn.Module):
    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6, sparse=sparse)
        self.hidden = nn.Linear(6, 6)
        self.out = nn.Linear(6, 10)
        self.out.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.hidden(self.embedding(x))))


CASES["tied weights"] = Case(Tied, mean_square_of_tokens)
CASES["tied weights that are sparse and dense"] = Case(lambda: Tied(sparse=True), mean_square_of_tokens, None)


class Branches(nn.Module):
    """Some ranks use `first`, others `second`, none `third`."""

    def __init__(self, make: Callable[[], nn.Module] = lambda: nn.Linear(6, 6)) -> None:
        super().__init__()
        self.first, self.second, self.third, self.trunk = make(), make(), make(), make()

    def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
        return getattr(self, branch)(self.trunk(x))


def branch_by_rank(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(numbers(step, rank), "first" if rank == step % 2 else "second").square().mean()


def always_own_branch(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(numbers(step, rank), "second" if rank else "first").square().mean()


def branch_by_rank_on_images(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(images(step, rank), "second" if rank else "first").square().mean()


CASES["branches that ranks take in turn"] = Case(Branches, branch_by_rank, UNUSED)
CASES["branches of ranks"] = Case(Branches, always_own_branch, UNUSED)
CASES["a branch in half precision"] = Case(
    lambda: Branches().bfloat16(),
    lambda model, step, rank: model(numbers(step, rank).bfloat16(), "second" if rank else "first").square().mean(),
    UNUSED,
    rtol=3e-2,
)
CASES["embedding"] = Case(lambda: nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 3)), mean_square_of_tokens)
CASES["sparse embedding"] = Case(
    lambda: nn.Sequential(nn.Embedding(10, 6, sparse=True), nn.Linear(6, 3)), mean_square_of_tokens
)


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(10, 6, sparse=True) for _ in range(3))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.bags[which](x)


def bags(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(tokens(step, rank), min(rank, 1)).square().mean()


CASES["sparse embedding that some ranks use"] = Case(Bags, bags, None)


class FunctionalEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.embedding(x, self.weight, sparse=True)


CASES["sparse gradients of a module of one's own"] = Case(FunctionalEmbedding, mean_square_of_tokens, None)


class First(nn.Module):
    """The first of a module's outputs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)[0]


CASES["LSTM"] = Case(lambda: First(nn.LSTM(6, 5, 2, batch_first=True)), lambda m, s, r: sequences(m, s, r))
CASES["GRU, both outputs"] = Case(
    lambda: nn.GRU(6, 5, bidirectional=True),
    lambda model, step, rank: sum(part.square().mean() for part in model(numbers(step, rank, 5, BATCH, 6))),
)


def sequences(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(numbers(step, rank, BATCH, 5, 6)).square().mean()


CASES["transformer"] = Case(
    lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True),
    lambda m, s, r: (sequences(m, s, r) - 1).square(),
)
CASES["attention"] = Case(
    lambda: nn.MultiheadAttention(6, 3, batch_first=True),
    lambda model, step, rank: model(*[numbers(step, rank, BATCH, 5, 6)] * 3)[0].square().mean(),
)


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant: bool, shared: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        if shared:
            self.blocks[2] = self.blocks[0]
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


CASES["checkpoints"] = Case(lambda: Checkpointed(use_reentrant=False))
CASES["reentrant checkpoints"] = Case(lambda: Checkpointed(use_reentrant=True))
CASES["a block in two checkpoints"] = Case(lambda: Checkpointed(use_reentrant=False, shared=True))
CASES["a block in two reentrant checkpoints"] = Case(
    lambda: Checkpointed(use_reentrant=True, shared=True), torch_options={"static_graph": True}
)
for reentrant in (False, True):
    CASES[f"the whole model in a checkpoint, use_reentrant={reentrant}"] = Case(
        mlp,
        lambda model, step, rank, reentrant=reentrant: (
            checkpoint(model, numbers(step, rank).requires_grad_(), use_reentrant=reentrant).square().mean()
        ),
        None,
    )


def freeze_in_turn(module: nn.Module, step: int) -> None:
    for i, layer in enumerate(module[::2]):
        layer.requires_grad_(i != step % 3)


CASES["layers frozen in turn"] = Case(mlp, torch_options=None, before_step=freeze_in_turn)
CASES["frozen layers"] = Case(lambda: mlp().append(nn.Linear(3, 3).requires_grad_(False)))


def images(step: int, rank: int) -> torch.Tensor:
    return numbers(step, rank, BATCH, 3, 6, 6)


def mean_square_of_images(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(images(step, rank)).square().mean()


def convolutions(norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 5, 3), norm(5), nn.ReLU(), nn.Conv2d(5, 2, 3))


def channels_last(module: nn.Module) -> nn.Module:
    return module.to(memory_format=torch.channels_last)


CASES["convolutions"] = Case(convolutions, mean_square_of_images, rtol=1e-4)
CASES["channels last"] = Case(lambda: channels_last(convolutions()), mean_square_of_images, rtol=1e-4)
CASES["channels last, branches of ranks"] = Case(
    lambda: channels_last(Branches(lambda: nn.Conv2d(3, 3, 3))), branch_by_rank_on_images, UNUSED
)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).abs() + self.bias


CASES["complex parameters"] = Case(Complex, torch_options=None)
CASES["double precision"] = Case(
    lambda: mlp().double(),
    lambda model, step, rank: model(numbers(step, rank, dtype=torch.float64)).square().mean(),
    rtol=1e-13,
)
for half, rounding in ((torch.bfloat16, 3e-2), (torch.float16, 5e-3)):
    CASES[f"{half}"] = Case(
        lambda half=half: mlp().to(half),
        lambda model, step, rank, half=half: model(numbers(step, rank, dtype=half)).float().square().mean(),
        rtol=rounding,
    )


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(6, 6, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float32)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x


CASES["several dtypes"] = Case(Mixed, rtol=3e-2)


@dataclasses.dataclass
class Answer:
    value: torch.Tensor
    more: dict[str, list[torch.Tensor]]


class Pair(NamedTuple):
    one: torch.Tensor
    other: torch.Tensor


class Answers(nn.Module):
    """Outputs of several forms: `make` of two tensors."""

    def __init__(self, make: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.one, self.other, self.make = nn.Linear(6, 3), nn.Linear(6, 3), make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(self.one(x), self.other(x))


FORMS: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "dict": (lambda a, b: {"a": a, "b": {"c": b}}, lambda out: out["a"] * out["b"]["c"]),
    "tuple": (lambda a, b: (a, 1, None, [b]), lambda out: out[0] * out[3][0]),
    "named tuple": (Pair, lambda out: out.one * out.other),
    "dataclass": (lambda a, b: Answer(a, {"b": [b]}), lambda out: out.value * out.more["b"][0]),
    "dataclass type": (lambda a, b: (a * b, Answer), lambda out: out[0]),
    "object": (lambda a, b: types.SimpleNamespace(a=a, b=b), lambda out: out.a * out.b),
    "object and a tensor that is not used": (lambda a, b: (a.sum(), types.SimpleNamespace(b=b)), lambda out: out[1].b),
}
for form, (make, use) in FORMS.items():
    CASES[f"output: {form}"] = Case(
        lambda make=make: Answers(make),
        lambda model, step, rank, use=use: use(model(numbers(step, rank))).square().mean(),
        None if "object" in form else {},
    )


class ReturnsParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self) -> torch.Tensor:
        return self.scale


CASES["output: a parameter"] = Case(
    ReturnsParameter, lambda model, step, rank: (model() * numbers(step, rank)).square().mean()
)
CASES["output changed in place"] = Case(
    mlp, lambda model, step, rank: model(numbers(step, rank)).mul_(3).add_(1).square().mean()
)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 6)
        self.again = self.one
        self.both = nn.Sequential(self.one, nn.Tanh(), self.one)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.both(self.again(x)) + self.one.weight.sum()


CASES["shared submodules"] = Case(Shared)


class SharesGradient(nn.Module):
    """Autograd hands `first` and `second` the same memory as their gradients, `parts` pieces of one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(64, 300)), nn.Parameter(torch.randn(300, 64))
        self.parts = nn.ParameterList(torch.randn(100, 10) for _ in range(2))
        self.whole = nn.Parameter(torch.randn(2000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.first.view(-1) + self.second.view(-1)
        other = torch.cat([part.view(-1) for part in self.parts]) + self.whole.view(2000)
        return torch.outer(x.sum(1), one[:2000] * other) * one[-1]


CASES["gradients that share memory"] = Case(SharesGradient)


class OddParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.transposed = nn.Parameter(torch.randn(5, 6).t())
        self.gaps = nn.Parameter(torch.randn(6, 10)[:, ::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scalar * (x @ self.transposed) + x @ self.gaps + self.empty.sum()


CASES["scalars, nothing and gaps"] = Case(OddParameters)
CASES["compiled module"] = Case(lambda: torch.compile(mlp(), backend="eager"))


class ReachesNothing(nn.Module):
    """On some ranks, backward() comes to no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, *, skip: bool) -> torch.Tensor:
        return x * 2 if skip else self.layer(x)


CASES["a rank where backward reaches no parameter"] = Case(
    ReachesNothing,
    lambda model, step, rank: model(numbers(step, rank).requires_grad_(), skip=rank == step % 2).square().mean(),
    None,
)
