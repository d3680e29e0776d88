"""`phalanx.spawn`: a function on several ranks of this machine, forked from one server that has imported torch.

Start with `spawn`, then `workers`, the side of the parent, and `worker`, the side of a rank. `phalanx.testing` stands
on the same.
"""
