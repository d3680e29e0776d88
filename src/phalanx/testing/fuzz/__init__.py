"""A fuzzer of the backend: random programs of collectives and messages, on phalanx and on another backend.

    python -m phalanx.testing.fuzz --against gloo --seconds 60 --ranks 4 --hosts 2

Start with `program`: what is drawn. Then `calls`, how each operation is called and what it must give; `memory`, in
which memory; `rank`, how a rank runs a program and has it judged; `session`, the ranks that run one program after
another; `shrink`, how a program that fails is cut down; `command`, the command line. Nothing here
imports `phalanx.backend`: programs call it through torch, as a script does.
"""
