"""What went wrong in a group: the core's codes as facts, facts as words, and who its ranks are.

Start with `wording`. Nothing here ends a group: the core does, or `hosts/failures` where there are several hosts.
"""
