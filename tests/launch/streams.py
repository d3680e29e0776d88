"""Streams that stand for a screen in the tests of what a rank prints."""

from __future__ import annotations


class Kept:
    """A stream that keeps what it is fed."""

    def __init__(self):
        self.data = b""

    def feed(self, data):
        self.data += data

    def finish(self):
        pass
