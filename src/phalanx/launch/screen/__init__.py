"""What a user sees of a job while it runs, and what he types: the ranks' streams, in order, on one terminal.

Start with `output`, then `ranks`. Nothing here decides about ranks.
"""
