"""This machine, as the kernel and the cluster show it: processors, memory, network, processes, schedulers.

``/proc``, ``/sys`` and the schedulers' variables are read only here; other packages ask this one. Start with `cpus`,
then `cgroups`. Functions that share out the machine take a number of ranks and know no more of a job. Nothing here
starts or signals a process or makes a process group; only `block_pool` imports torch, and keeps state.
"""
