"""Groups whose ranks are on several hosts: how they form, which bytes cross, and how they end.

Start with `joining`, which forms every group, then `bridged`, then `steps`. The bytes travel through an existing
engine (`channels`): nothing here is a transport of its own. Such a group offers what the core's group offers, so
everything above it is the same on one host and on many.
"""
