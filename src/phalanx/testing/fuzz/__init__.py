"""A fuzzer of the backend: random programs of collectives and messages, on phalanx and on another backend.

    python -m phalanx.testing.fuzz --against gloo --seconds 60 --ranks 4 --hosts 2

Start with `program`, the random program. `calls` makes each operation and knows its expected results, `memory` lays out
its tensors, `rank` runs a program and checks the results, `compare` computes expected results and describes
differences, `session` keeps ranks for one program after another, `shrink` reduces a failing program, and `command` is
the command line. Programs call the backend through torch, as a script does. Nothing here imports `phalanx.backend`
except `compare`, which takes the bounds of correct results from it.
"""
