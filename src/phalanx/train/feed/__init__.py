"""The sources of a trainer's batches: a dataset that it divides, or a loader as it is.

Start with `open_feed`, which chooses, then `feed`, the interface of both. Nothing here computes a step.
"""
