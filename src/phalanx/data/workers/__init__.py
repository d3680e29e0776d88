"""The worker processes of a loader, what connects each with its rank, and what happens when one dies.

Start with `results`, then `worker`. Nothing here knows what a batch holds.
"""
