"""Batches of a loader's workers, handed over to their rank in memory without a name.

Start with `handing_over`, then `batch_blocks`. Nothing here knows which samples are in a batch.
"""
