"""Detects whether the ranks' copies of a model differ: once (`check`), or while the model trains (`sentinel`).

Start with `check`. Nothing here repairs a copy.
"""
