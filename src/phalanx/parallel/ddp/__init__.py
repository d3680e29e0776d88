"""`DistributedDataParallel`: gradients averaged over the ranks, bucket by bucket, while backward runs.

Start with `ddp`, then `reducer`. Works with any backend; nothing here steps an optimizer.
"""
