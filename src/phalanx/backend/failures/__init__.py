"""Failures of a group: turns the core's codes into facts and the facts into words, and identifies ranks.

Start with `wording`. Nothing here ends a group: the core does, or `hosts/failures` if the group spans several hosts.
"""
