"""Publications: a trainer publishes its weights, and any number of its user's processes on the host read them in place.

Start with `publishing`, then `subscribing`. Nothing here writes a tensor to disk, or knows of groups and ranks.
"""
