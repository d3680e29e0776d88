"""The processes of a job: the parents of the ranks, how all of them end together, and what forked processes share.

The forker is the parent of the ranks. The reaper is the parent of the forker, and kills the forker and the ranks if the
supervisor or the forker dies. Start with `forker`, then `forkers`, the supervisor's handle for all forkers. Nothing
here decides when a rank starts or ends.
"""
