"""``phalanx tune``: measures a script's own steps with a handful of settings, and prints the best command for it.

Start with `search`, then `trials`. `trial_job`, a job whose ranks step on demand, also serves ``phalanx check``.
Nothing here runs inside a rank, imports torch or changes the user's script: `launch/rank_trial` is the part that runs
inside the ranks.
"""
