"""The replicator: a process that copies this node's snapshots into other nodes' memory, and keeps copies of theirs.

It runs beside the supervisor. Start with `replicator`. Nothing here knows what a snapshot holds.
"""
