"""This machine, as the kernel and the cluster show it: processors, memory, network, processes, schedulers.

Other packages read ``/proc``, ``/sys`` and the schedulers' variables through this package. Start with `cpus`, then
`cgroups`. Functions that divide the machine take a number of ranks and know nothing else about a job. Nothing here
starts a process, signals a process or makes a process group, and only `block_pool` imports torch.
"""
