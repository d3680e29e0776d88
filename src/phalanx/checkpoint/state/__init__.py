"""What a checkpoint holds: state as a tree of JSON, its tensors as blocks of the ranks, an image of a rank's part.

Start with `tree`, then `blocks`. Nothing here knows where an image is kept.
"""
