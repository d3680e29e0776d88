"""A job on this node: one attempt after another, until an attempt succeeds or no restart is left.

Start with `supervisor`, which runs one attempt, then `attempts`. Nothing here imports torch, so nothing that breaks
torch can break the launcher.
"""
