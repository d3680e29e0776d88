"""The classes and methods that each torch version expects of a backend, and how its calls reach our operations.

Start with `adapters`. Nothing here computes or waits.
"""
