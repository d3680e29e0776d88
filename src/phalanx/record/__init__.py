"""The record of a run: the black boxes of its ranks, and the folder with their logs and notes.

A rank writes into memory that other processes of the same user may read; under a launcher, this memory outlives the
rank. An event costs some 20 ns. Start with `box`, which reads black boxes, then `writer`, the rank's side. Nothing here
decides what happens to a job: the record says which rank is slow or has failed, and other packages act on it.
"""
