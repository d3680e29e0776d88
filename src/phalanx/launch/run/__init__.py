"""A job on this node: one attempt after another, each with its ranks, until none is left to make.

Start with `supervisor`, one attempt from start to end, then `attempts`. Only the standard library is imported: nothing
that breaks torch can break it.
"""
