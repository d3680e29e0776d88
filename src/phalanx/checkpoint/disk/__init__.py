"""A folder of checkpoints: one folder for each step, published by a rename, claimed by one attempt of one job.

Start with `folder`. Nothing here needs torch, or knows what a checkpoint holds.
"""
