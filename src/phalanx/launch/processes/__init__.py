"""The processes of a job: who forks ranks, who outlives whom, and what forked processes share.

The forker is the parent of the ranks. The reaper is the parent of the forker, and kills the forker and the ranks if it
must. Start with `forker`, then `forkers`, the supervisor's view of them. Nothing here decides when a rank starts or
ends.
"""
