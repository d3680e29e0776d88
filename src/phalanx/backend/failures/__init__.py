"""Failures of a group: the core's codes as facts, facts as words, and the identity of its ranks.

Start with `wording`. Nothing here ends a group: the core does, or `hosts/failures` where there are several hosts.
"""
