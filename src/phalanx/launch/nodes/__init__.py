"""A job on several nodes: their agents agree on which nodes train, and each agent gives orders to its supervisor.

Start with `agreement`, which holds the rules and uses neither sockets nor clocks, then read `agent`. Nothing here
starts a rank: the supervisor does.
"""
