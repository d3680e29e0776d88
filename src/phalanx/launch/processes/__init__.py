"""The processes of a job: who forks ranks, who outlives whom, and what forked processes share.

The forker is the ranks' parent; the reaper is the forker's, and ends everything if it must. Start with `forker`, then
`forkers`, as the supervisor sees them. Nothing here decides when a rank starts or ends.
"""
