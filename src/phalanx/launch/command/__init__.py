"""``phalanx run``: the command line and the environment become a job, which is run and ends with an exit code.

`flags` declares the flags once, `plan` makes a `Job` of them, `run` runs it. Start with `main`, then `flags`. Nothing
here watches ranks.
"""
