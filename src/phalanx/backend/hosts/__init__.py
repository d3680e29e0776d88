"""Groups whose ranks are on several hosts: how they form, which bytes pass between hosts, and how they end.

Start with `joining`, which forms every group, then `bridged`, then `steps`. The bytes travel through an existing
engine, Gloo or MPI (`channels`). Such a group has the same methods as the core's group, so its callers are the same on
one host and on many. Phalanx sends no tensors between hosts itself, and nothing here knows torch's front end.
"""
