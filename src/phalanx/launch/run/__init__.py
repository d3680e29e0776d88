"""A job on this node: one attempt after another, until an attempt succeeds or the ranks may not be restarted.

Start with `supervisor`, which runs one attempt, then `attempts`. Nothing here imports torch, so nothing that breaks
torch can break the launcher.
"""
