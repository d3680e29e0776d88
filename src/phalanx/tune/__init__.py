"""``phalanx tune``: a script's own steps, measured in a handful of settings, and the command that is best for it.

Start with `search`, then `trials`. ``phalanx check`` uses `trial_job`, too: a job whose ranks step on demand.
"""
