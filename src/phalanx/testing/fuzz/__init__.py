"""A fuzzer of the backend: random programs of collectives and messages, on phalanx and on another backend.

    python -m phalanx.testing.fuzz --against gloo --seconds 60 --ranks 4 --hosts 2

Start with `program`, the random program. `calls` makes each operation and computes its expected results, `memory` lays
out its tensors, `rank` runs a program and checks its results, `session` keeps ranks for one program after another,
`shrink` reduces a failing program, and `command` is the command line. Nothing here imports `phalanx.backend`:
programs call it through torch, as a script does.
"""
