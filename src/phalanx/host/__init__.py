"""This machine, as the kernel and the cluster show it: processors, memory, network, processes, schedulers.

``/proc``, ``/sys`` and the schedulers' variables are read in this room alone; others ask it. Start with `cpus`, then
`cgroups`. Nothing here imports torch, knows of jobs or ranks, or keeps state.
"""
