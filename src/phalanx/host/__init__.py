"""This machine, as the kernel and the cluster show it: processors, memory, network, processes, schedulers.

``/proc``, ``/sys`` and the schedulers' variables are read only here; other packages ask this one. Start with `cpus`,
then `cgroups`. Nothing here imports torch, knows of jobs or ranks, or keeps state.
"""
