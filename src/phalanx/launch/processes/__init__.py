"""The processes of a job: which one forks ranks, which ends when another ends, and what forked processes share.

The forker is the parent of the ranks. The reaper is the parent of the forker, and kills the forker and the ranks if the
supervisor or the forker dies. Start with `forker`, then `forkers`, the supervisor's handle for all forkers. Nothing
here decides when a rank starts or ends.
"""
