"""``phalanx top``: shows live what the ranks of running jobs do and use.

Start with `watch`, what each look sees; `screen` draws it.
"""
