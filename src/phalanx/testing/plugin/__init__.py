"""The pytest plugin: a test marked with ``ranks`` runs on every rank of a process group of its own.

pytest calls `hooks`, which imports nothing more until a test is marked; `item` forks the ranks, and `on_rank` is their
side. Start with `hooks`, then `item`. Nothing here changes a test without the mark.
"""
