"""Starts the ranks of a job, watches them, and ends them together.

`command/` turns a command line into a job, and `run/` runs it. `processes/` holds the parent processes of the ranks,
`screen/` the terminal output, `nodes/` jobs on several hosts, `replicas/` the copies of snapshots on other hosts,
`spawn/` ranks that run a function instead of a script, and `warm/` jobs that start with torch already imported. Start
with `job`, then `run/supervisor`. The supervisor does not import torch, so it is ready long before an import of torch
would end, and nothing that breaks torch can break it. Nothing here makes a process group.
"""
