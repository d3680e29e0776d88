"""`phalanx.spawn`: runs a function on several ranks of this machine, forked from one server that has imported torch.

Start with `spawn`, then `workers`, the parent's side, and `worker`, the rank's side. `phalanx.testing` uses them, too.
Nothing here restarts ranks, keeps logs or knows of other hosts: `phalanx run` does all that.
"""
