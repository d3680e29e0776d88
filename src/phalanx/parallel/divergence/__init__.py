"""Tests that the ranks' copies of a model are still the same: once (`check`), or during training (`sentinel`).

Start with `check`. Nothing here repairs a copy.
"""
