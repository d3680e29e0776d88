"""The record of a run: the black boxes of its ranks, and the folder with their logs and notes.

A rank writes into memory that outlives it, in nanoseconds; anyone reads it. Start with `box`, which says what lies in a
black box, then `writer`, the side of a rank. Nothing here judges: who is slow is counted, who is to blame is not.
"""
