"""Measure phalanx against Gloo, Open MPI and plain memcpy, side by side: ``python -m bench`` (``make bench``).

All engines take turns in small rounds, so that the drift of a shared machine affects all engines equally. `plan` lists
the measurements and the targets, `ranks` starts the processes and makes each set of them measure in its turn, `worker`
is the program of these processes, `engines` contains the operations of each engine, and `report` writes the table, the
JSON and the plot.
"""
