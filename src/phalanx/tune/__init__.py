"""``phalanx tune``: measures a script's own steps in a handful of settings, and prints the best command for it.

Start with `search`, then `trials`. ``phalanx check`` uses `trial_job`, too: a job whose ranks step on demand. Nothing
here runs inside a rank (`launch/rank_trial` does), imports torch or changes the user's script.
"""
