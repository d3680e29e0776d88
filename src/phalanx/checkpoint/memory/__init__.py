"""Snapshots in memory that the supervisor of ``phalanx run`` holds: they outlive the ranks that wrote them.

Start with `layout`, which describes the memory and imports no torch, then `snapshots`. Nothing here writes to disk.
"""
