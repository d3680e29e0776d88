"""``phalanx why``: evidence of each rank, findings about them all, one sentence.

Start with `activity`, what one rank does, then `findings`, then `wording`. `past` has the same of a job that has ended.
"""
