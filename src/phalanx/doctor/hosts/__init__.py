"""The hosts of a job, examined together: they meet in a store, and missing hosts are named.

Start with `hosts`. Nothing here trusts what another host says unchecked.
"""
