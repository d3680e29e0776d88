"""How a run ends early and goes on: which run a folder holds, what is taken up from it, when it is saved.

Start with `restarts`, then `resumption`, then `saving`. Nothing here computes a step.
"""
