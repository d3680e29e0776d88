"""The shapes that each torch version expects of a backend, and the ways from its calls to our operations.

Start with `adapters`. Nothing here computes or waits.
"""
