"""An optimizer for scripts of tests, which lie beside a copy of this file: ``from descent import Descent``.

The first optimizer of torch's own imports torch._dynamo, which costs each rank more than a second of a CPU; so what is
not about optimizers trains with this one. Hooks of optimizers are called as ever.
"""

import torch

_BASE = torch.optim.Optimizer


def _plain(method):
    return getattr(method, "__wrapped__", method)  # without the import


class Descent(_BASE):
    """Gradient descent, as `torch.optim.SGD` without any option."""

    add_param_group = _plain(_BASE.add_param_group)
    zero_grad = _plain(_BASE.zero_grad)

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self):
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.sub_(param.grad, alpha=group["lr"])
