"""The terminal of a job: shows the output of all ranks without mixing their lines, and passes on what the user types.

Start with `output`, then `ranks`. Nothing here decides when a rank starts or ends.
"""
