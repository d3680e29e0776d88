"""``phalanx why``: gathers evidence about each rank, draws one finding, and puts the finding into a sentence.

Start with `evidence`, then `findings`, then `wording`. `activity` describes what one rank does; `past` gathers the
evidence about a job that has ended, and `other_hosts` gathers the evidence from other hosts. Nothing here changes what
a rank does, and only `wording` and `clauses` make sentences.
"""
