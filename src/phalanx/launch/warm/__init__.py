"""A preloaded process that outlives jobs: the next one is forked from it instead of importing torch anew.

`client` is what ``phalanx run --warm`` needs to reach it, and imports next to nothing. `server` is the warm process,
and `guard` its child for each job. Everything inside a job is as it is without them. Start with `client`.
"""
