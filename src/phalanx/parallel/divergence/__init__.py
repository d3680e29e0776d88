"""Whether the ranks' copies of a model are still the same: asked once (`check`), or while it trains (`sentinel`).

Start with `check`. Nothing here mends a copy.
"""
