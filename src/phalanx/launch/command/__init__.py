"""``phalanx run``: the command line and the environment become a job, which is run and ends with an exit code.

`flags` declares the flags once, `plan` turns them into a `Job`, `run` runs the job. Start with `main`, then `flags`.
Nothing here watches ranks.
"""
