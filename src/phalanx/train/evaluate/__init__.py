"""Evaluation in which each sample counts once, and the choice of the best evaluation.

Start with `evaluation`, then `best_metric`. Nothing here changes a weight, or saves a checkpoint.
"""
