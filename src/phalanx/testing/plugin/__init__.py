"""The pytest plugin: a test marked with ``ranks`` runs on every rank of a process group of its own.

`hooks` is what pytest calls, and imports nothing more until a test is marked; `item` forks the ranks, `on_rank` is
their side. Start with `hooks`.
"""
