"""``phalanx tune``: a script's own steps, measured in a handful of settings, and the command that is best for it."""
