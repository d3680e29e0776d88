"""Starts the ranks of a job, watches them, and ends them together.

`command/` turns a command line into a job, `run/` runs it, `processes/` holds the ranks' parents, `screen/` the
terminal, `nodes/` jobs on several hosts, `replicas/` copies of snapshots, `spawn/` ranks that run a function instead of
a script, `warm/` starts without imports. Start with `job`, then `run/supervisor`. The supervisor imports only the
standard library: it is up before torch could be imported, and nothing that breaks torch can break it. Nothing here
makes a process group or computes with tensors.
"""
