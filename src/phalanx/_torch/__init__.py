"""torch's private names: where each is found, why phalanx uses it, and what happens in a torch that lacks it.

No other package of phalanx uses a private name of torch; ``tests/test_torch_names.py`` checks that. A name in `NAMES`
is looked up on first use. Hot paths and classes write ``from phalanx._torch import dispatch_keys``, which looks the
name up once, at import. Other code writes ``_torch.get_default_store()``, which looks it up at the call, so only that
call fails if torch lacks the name. All names exist in torch 2.11, 2.13 and 2.15.

If phalanx is installed, every ``import torch`` runs this module; `names` and `lookup` are loaded only when one of their
names is used. Start with `names`, the table. Nothing here makes a group or trains. `replace` and `shield` do more than
give access to names; they are here because they rely on private names.
"""

import importlib
import sys
from typing import Any

_MODULES = {
    "dynamo",
    "forkserver",
    "lookup",
    "names",
    "nested",
    "options",
    "replace",
    "shield",
    "shrinking",
    "stand_in",
    "storages",
    "tensors",
    "unverified",
}


def __getattr__(key: str) -> Any:
    if key in _MODULES:  # ``from phalanx._torch import shield`` first looks for an attribute
        raise AttributeError(f"module 'phalanx._torch' has no attribute {key!r} yet")
    if key == "rendezvous_handlers" and hasattr(
        sys.modules.get("torch.distributed.rendezvous"), "_rendezvous_handlers"
    ):
        found = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers  # without loading the table
    else:
        found = getattr(importlib.import_module("phalanx._torch.lookup"), key)
    globals()[key] = found
    return found


def version() -> tuple[int, ...]:
    """Return torch's version, major and minor."""
    import torch

    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
