"""The source of a trainer's batches: a dataset that the trainer divides among the ranks, or the script's own loader.

Start with `open_feed`, which chooses between the two, then `feed`, their common interface. Nothing here computes a
step.
"""
