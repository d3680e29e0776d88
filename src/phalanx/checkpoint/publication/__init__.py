"""Weights that a trainer publishes, and any number of other processes of its user on the host read where they lie.

Start with `publishing`, then `subscribing`. Nothing here writes a tensor to disk, or knows of groups and ranks.
"""
