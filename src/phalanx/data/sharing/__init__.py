"""`phalanx.share`: data that a host holds once, however many ranks and workers read it.

Start with `share`, then `packing`. `kept` finds data again after a restart, and `cached_items` keeps items that
are slow to make. Nothing here loads, divides or changes samples, and nothing lies in ``/dev/shm``.
"""
