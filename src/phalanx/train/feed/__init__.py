"""The source of a trainer's batches: a dataset that it divides among the ranks, or the script's own loader.

Start with `open_feed`, which chooses, then `feed`, the interface of both. Nothing here computes a step.
"""
