"""Start the ranks of a job, watch them, and end them together.

The side of the supervisor is standard library only: it is up before torch could be imported, and nothing that breaks
torch can break it.
"""
