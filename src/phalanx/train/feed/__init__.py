"""Where a trainer's batches come from: a dataset that it divides, or a loader as it is; and how many processes load it.

Start with `open_feed`, which chooses, then `feed`, what a trainer asks of each.
"""
