"""Warm processes: they have imported torch and outlive jobs, and jobs are forked from them instead of importing anew.

`client` is the side of ``phalanx run --warm``, and imports next to nothing. `server` is the warm process, and `guard`
its child for each job. Start with `client`. Nothing here changes what happens inside a job: that is the same as after a
cold start.

**The whole job is forked, supervisor included.** Forking only ranks for a supervisor that is started anew was the
alternative: exit codes, the subreapers, the reaper's watch and every signal would have to go over sockets, and the
supervisor's own imports would remain, which alone take longer than a warm job's start. Forked whole, nothing inside a
job differs; what had to be made is the command, a thin client.

**The client decides nothing.** It asks each warm process in turn. Each checks whether a job that it forks would be the
same as one that the client starts: it compares what processes inherit, by its own ``/proc`` and the client's; whether
the files that it has imported have changed; and, once it has planned the job, the whole environment in which ranks
would import torch. Only variables on a list of harmless ones may differ.
"""
