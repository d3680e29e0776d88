"""``phalanx top``: shows live what the ranks of running jobs do and use.

Start with `watch`, which collects what is shown, then `screen`, which draws it. Nothing here changes what a rank does,
and nothing may take more than a few percent of the ranks' CPUs.
"""
