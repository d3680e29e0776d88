"""``phalanx top``: shows live what the ranks of running jobs do and use.

Start with `watch`, which collects what is shown, then `screen`, which draws it. Nothing here changes what a rank does,
or may cost its CPUs more than a few percent.
"""
