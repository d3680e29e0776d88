"""``phalanx top --web``: the jobs of this user on this host as a live page.

A thread looks at the jobs as ``top`` does while anybody watches; the server draws views of what it saw, and sends what
has changed to each browser. Start with `web`, the server, then `views`. Nothing here changes a job, and nothing is
gathered in a way of its own.
"""
