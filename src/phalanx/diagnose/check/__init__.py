"""``phalanx check``: runs a script's first steps on real ranks of this host, and compares what each of them called.

Start with `watch`, then `result`. Nothing here adds a check to a rank: the command reads only what ranks record anyway.
"""
