"""Starts the ranks of a job, watches them, and ends them together.

`command/` turns a command line into a job, `run/` runs it, `processes/` has the ranks' parents, `screen/` the
terminal, `nodes/` several hosts, `replicas/` copies of snapshots, `spawn/` functions in place of scripts, `warm/` a
start without imports. Start with `job`, then `run/supervisor`. The supervisor imports only the standard library: it is
up before torch could be imported, and nothing that breaks torch can break it.
"""
