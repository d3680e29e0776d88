"""Explanations of messages: the meaning of each message, and what to do about it.

The entries are Markdown, one file for each topic and language beside this one. ``phalanx explain`` prints them, and the
documentation includes the same files. Start with `entries`, then `search`. Nothing here examines a job: it only finds
and prints texts.
"""
