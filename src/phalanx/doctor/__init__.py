"""``phalanx doctor``: whether this host, and the hosts of a job together, can train; what is wrong, and what to do.

Everything is tried rather than guessed, each test with a deadline. The command itself imports no torch: what needs it
runs in a process of its own, so that a torch that can't be imported, crashes or hangs is a finding like any other.
"""
