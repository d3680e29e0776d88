"""Communication between the processes of a job: files, sockets, packets, torch's store, the ranks of a group.

Each module is one kind of channel, with its checks and deadlines; what is said, and by which process, is up to its
users. Start with `packets`, then `store`. Nothing here knows of launchers, groups of the backend or checkpoints.
"""
