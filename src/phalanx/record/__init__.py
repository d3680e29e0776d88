"""The black box of a rank: what it did last, written in nanoseconds into memory that outlives it, read by anyone."""
