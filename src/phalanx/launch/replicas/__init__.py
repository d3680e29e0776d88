"""The replicator: a process beside the supervisor that copies this node's snapshots into other nodes' memory, and keeps
snapshots of theirs. Start with `replicator`. Nothing here knows what a snapshot holds.
"""
