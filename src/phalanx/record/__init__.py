"""The record of a run: the black boxes of its ranks, and the folder with their logs and notes.

A rank writes into memory that outlives it, which costs nanoseconds, and anyone may read it. Start with `box`, which
reads black boxes, then `writer`, the rank's side. Nothing here judges: the record counts who is slow, and does not say
who is to blame.
"""
