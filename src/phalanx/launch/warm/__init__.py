"""A preloaded process that outlives jobs: the next one is forked from it instead of importing torch anew.

`places`, `wire` and `client` are what ``phalanx run --warm`` needs to reach it; they import next to nothing. `server`
is the warm process, and `guard` its child for each job. Everything inside a job is as it is without them.
"""
