"""A job on several nodes: an agent on each agrees with the others on who trains, and gives its supervisor orders.

Start with `agreement`, which holds the rules and uses neither sockets nor clocks, then read `agent`. Nothing here
starts a rank: the supervisor does.
"""
