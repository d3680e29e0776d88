"""Start the ranks of a job, watch them, and end them together.

Standard library only: the supervisor is up before torch could be imported, and
nothing that breaks torch can break it.
"""

from phalanx.launch.supervisor import Job, run

__all__ = ["Job", "run"]
