"""Explanations of messages: the meaning of each message, and what to do about it.

The entries are Markdown: each language has a folder with one file for each topic. ``phalanx explain`` prints entries,
and the documentation includes the same files. Start with `entries`, then `search`. Nothing here examines a job: it only
finds and prints texts.
"""
