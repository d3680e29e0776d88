"""Tensors that other ranks of the host map, and torch's windows on them.

Start with `tensors`, then `window`. The memory is a block of `phalanx.host.shared_blocks`; signals wait in the core
(``csrc/p2p/signals.h``). Nothing here knows how memory is handed over, and no collective uses this package.
"""
