"""A preloaded process that outlives jobs: the next one is forked from it instead of importing torch anew.

`client` is what ``phalanx run --warm`` needs to reach it, and imports next to nothing. `server` is the warm process,
and `guard` its child for each job. Everything inside a job is as it is without them. Start with `client`.

**The whole job is forked, supervisor included.** Forking only ranks for a supervisor that is started anew was the
alternative: exit codes, the subreapers, the reaper's watch and every signal would have to go over sockets, and the
supervisor's own imports would remain, which alone take longer than a warm job's start. Forked whole, nothing inside a
job differs; what had to be made is the command, a thin client.

**Nothing is decided by the client.** It asks each warm process in turn, and each compares what counts when a process
starts: its own ``/proc`` with the client's, the files that it was made of, and, once it has planned the job, the whole
environment in which ranks would import torch. Variables that are known to mean nothing are listed, not those that mean
something.
"""
