"""``phalanx why``: evidence about each rank, a finding about them all, one sentence.

Start with `evidence`, then `findings`, then `wording`. `activity` is what one rank does; `past` gathers the
evidence about a job that has ended, `other_hosts` that of other hosts.
"""
