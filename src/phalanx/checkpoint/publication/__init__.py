"""Publications: a trainer publishes its weights, and other processes of the same user on the host read them in place.

Start with `publishing`, then `subscribing`. Nothing here writes a tensor to disk, or knows of groups and ranks.
"""
