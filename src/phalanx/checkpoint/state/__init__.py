"""The content of a checkpoint: state as a tree of JSON, tensors as blocks of the ranks, each rank's part as an image.

Start with `tree`, then `blocks`. Nothing here knows where an image is kept.
"""
