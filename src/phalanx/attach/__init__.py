"""``phalanx attach``: a debugger in one rank of a running job."""
