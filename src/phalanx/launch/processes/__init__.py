"""Who forks ranks, who outlives whom, and what forked processes share.

The warden is the ranks' parent; the keeper is the warden's, and ends everything if it must. Start with `warden`, then
`wardens`, as the supervisor sees them. Nothing here decides when a rank starts or ends.
"""
