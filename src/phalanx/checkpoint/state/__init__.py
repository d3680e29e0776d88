"""The content of a checkpoint: the state is a tree of JSON, tensors are cut into blocks, each rank's part is an image.

Start with `tree`, then `blocks`. Nothing here knows where an image is kept.
"""
