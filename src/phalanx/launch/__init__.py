"""Start the ranks of a job, watch them, and end them together.

`command/` makes a job of a command line, `run/` runs it, `processes/` has the ranks' parents, `screen/` what is shown,
`nodes/` several hosts, `replicas/` their snapshots, `spawn/` functions in place of scripts, `warm/` a start without
imports. Start with `job`, then `run/supervisor`. The supervisor is standard library alone: it is up before torch could
be imported, and nothing that breaks torch can break it.
"""
