"""A debugger in one rank of a job, while the others wait for it however long that takes."""

HELD_BY = "a debugger at "
"""What a rank says on the boards of its groups while a debugger holds it; the line follows."""
