"""A job on several nodes: an agent on each agrees with the others on who trains, and tells its supervisor what to do.

Start with `agreement`, rules alone without socket or clock, then `agent`. Nothing here starts a process of a rank.
"""
