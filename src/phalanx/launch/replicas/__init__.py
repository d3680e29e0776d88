"""A process beside the supervisor that copies this node's snapshots to other nodes' memory, and keeps theirs.

Start with `replicator`. Nothing here knows what a snapshot holds.
"""
