"""Communication between the processes of a job: files, sockets, packets, torch's store, the ranks of a group.

Each module is one kind of channel, with its checks and deadlines; what is sent, and by which process, is up to the
module's users. Start with `packets`, then `store`. Nothing here knows of launchers, groups of the backend or
checkpoints.
"""
