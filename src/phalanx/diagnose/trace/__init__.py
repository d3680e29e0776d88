"""``phalanx trace``: writes black boxes as one timeline for ui.perfetto.dev.

Start with `perfetto`, then `clocks`, which relates the clocks of several hosts. Nothing here changes what a rank does.
"""
