"""``phalanx doctor``: checks whether this host, or all hosts of a job, can train, and says what to do about problems.

It runs real tests rather than guessing, each with a deadline. The command itself does not import torch; all tests that
need torch run in a separate process, so a torch that can't be imported, crashes or hangs is a finding like any other.
Start with `examination`. Nothing here changes a setting of the machine.
"""
