"""Communication between the processes of a job: files, sockets, packets, torch's store, the ranks of a group.

Each module is one kind of channel, with its checks and deadlines; the module's users decide which process sends which
data. Start with `packets`, then `store`. Nothing here depends on launchers, the backend's groups or checkpoints.
"""
