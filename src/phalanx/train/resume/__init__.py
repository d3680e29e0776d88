"""Ends a run early and resumes it: which run a folder holds, what is restored from it, and when it is saved.

Start with `restarts`, then `resumption`, then `saving`. Nothing here computes a step.
"""
