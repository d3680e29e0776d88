"""``phalanx check``: a script's first steps on real ranks of this host, and what each of them called.

Start with `watch`, then `result`.
"""
