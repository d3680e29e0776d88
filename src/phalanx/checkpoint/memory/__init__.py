"""Snapshots of the ranks' state, in memory that the supervisor of ``phalanx run`` holds, so that they outlive the
ranks.

Start with `layout`, which describes the memory and imports no torch, then `snapshots`. Nothing here writes to disk.
"""
