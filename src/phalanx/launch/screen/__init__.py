"""The terminal of a job: the ranks' streams, in order, and what the user types.

Start with `output`, then `ranks`. Nothing here decides about ranks.
"""
