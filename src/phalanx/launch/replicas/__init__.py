"""The replicator: a process that sends copies of this node's snapshots to other nodes, and keeps copies that they send.

The replicator runs beside the supervisor. Start with `replicator`. Nothing here depends on the contents of a snapshot.
"""
