"""Detects whether the ranks' copies of a model differ: once (`check`), or while it trains (`sentinel`).

Start with `check`. Nothing here repairs a copy.
"""
