"""``phalanx top``: what ranks of running jobs do and use, again and again.

Start with `watch`, what each look sees; `screen` draws it.
"""
