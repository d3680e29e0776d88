"""Measure phalanx against Gloo, Open MPI and plain memcpy, side by side: ``python -m bench`` (``make bench``).

All engines take turns in small rounds, so that the drift of a shared machine hits them alike. `plan` lists what is
measured and the targets, `ranks` starts the processes and tells each set when to measure, `worker` is one of those
processes, `engines` holds the operations of each engine, `report` writes the table, the JSON and the plot.
"""
