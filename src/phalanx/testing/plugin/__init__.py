"""The pytest plugin: a test marked with ``ranks`` runs on every rank of a process group of its own.

pytest calls `hooks`, which imports no other module of phalanx until it finds a marked test; `item` forks the ranks, and
`on_rank` runs in them. Start with `hooks`, then `item`. Nothing here changes a test without the mark.
"""
