"""Warm processes, which have imported torch and outlive jobs. Jobs are forked from them and need no import of torch.

`client` is the side of ``phalanx run --warm``, and imports next to nothing. `server` is the warm process, and `guard`
is the child that the warm process forks for each job. Start with `client`. Nothing here changes what happens inside a
job: a job runs in the same way as after a cold start.

**The whole job is forked, supervisor included.** The alternative was to start a new supervisor for each job and fork
only the ranks. Then exit codes, the adoption of orphans, the reaper's watch and every signal would have to go over
sockets. And the new supervisor would still have to import its own modules, which alone takes longer than the start of a
warm job. If the whole job is forked, nothing inside it differs. Only the command itself had to be written a second
time, as a thin client.

**The client decides nothing.** It asks each warm process in turn. Each warm process checks whether a job that it forks
would be the same as a job that the client starts. It compares its own inherited properties with the client's, both from
``/proc``, and looks for changes to the files that it has imported. The child that plans the job also compares the whole
environment in which ranks would import torch. Only variables on a list of harmless ones may differ.
"""
