"""The replicator: a process that copies this node's snapshots into other nodes' memory, and keeps their copies here.

The replicator runs beside the supervisor. Start with `replicator`. Nothing here depends on the contents of a snapshot.
"""
