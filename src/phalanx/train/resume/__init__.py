"""How a run ends early and resumes: which run a folder holds, what is restored from it, and when the state is saved.

Start with `restarts`, then `resumption`, then `saving`. Nothing here computes a step.
"""
