"""The hosts of a job, examined together: they meet in a store, and missing hosts are named.

Start with `hosts`. This whole package runs in the process that has torch. Nothing here uses a value from another host
before `messages` has checked its form.
"""
