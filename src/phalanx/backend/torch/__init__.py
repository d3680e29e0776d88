"""The classes and methods that each torch version expects of a backend, and how torch's calls reach our operations.

Start with `adapters`. Nothing here implements an operation.
"""
