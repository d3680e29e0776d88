"""torch's private names: where each is found, why phalanx uses it, and what happens in a torch that lacks it.

Nothing else in phalanx uses one; ``tests/test_torch_names.py`` holds this. A name of `NAMES` is looked up when it is
first asked for: `from phalanx._torch import dispatch_keys` binds it once, for hot paths and for classes;
``_torch.get_default_store()`` asks where it is used, so that a missing name fails there and nowhere else. All of
them were seen in torch 2.11, 2.13 and 2.15.

Every ``import torch`` runs this module where phalanx is installed; the table and the rest are loaded when the first
other name is asked for. Start with `names`, the table.
"""

import importlib
import sys
from typing import Any

_MODULES = {"dynamo", "forkserver", "lookup", "names", "nested", "replace", "shield", "stand_in", "tensors"}


def __getattr__(key: str) -> Any:
    if key in _MODULES:  # ``from phalanx._torch import shield`` asks here first
        raise AttributeError(f"module 'phalanx._torch' has no attribute {key!r} yet")
    if key == "rendezvous_handlers" and hasattr(
        sys.modules.get("torch.distributed.rendezvous"), "_rendezvous_handlers"
    ):
        found = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers  # without the table
    else:
        found = getattr(importlib.import_module("phalanx._torch.lookup"), key)
    globals()[key] = found
    return found


def version() -> tuple[int, ...]:
    """Return torch's version, major and minor."""
    import torch

    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
