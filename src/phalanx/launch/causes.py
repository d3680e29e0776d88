"""Which errors are those of a victim: a rank that failed because a peer had gone, or did not come."""

from __future__ import annotations

import re
from collections.abc import Iterable

_KINDS = {
    # phalanx
    "RankFailed",
    "GroupAborted",
    "GroupUnusable",
    "CollectiveTimeout",
    # torch's stores
    "DistNetworkError",
    # sockets
    "ConnectionError",
    "ConnectionResetError",
    "ConnectionAbortedError",
    "ConnectionRefusedError",
    "BrokenPipeError",
}

# Where the kind is a bare RuntimeError or DistBackendError, the text tells.
_TEXTS = re.compile(
    r"running the callback: (?:RankFailed|GroupAborted|GroupUnusable|CollectiveTimeout):"  # of a future of phalanx
    r"|made calls that do not fit together, as rank \d+ reports"  # of a rank that knows no more
    r"|main_process_first: rank \d+ went first and failed"  # of a session
    r"|closed by (?:remote )?peer|[Cc]onnection reset by peer|Broken pipe"  # Gloo and NCCL
    r"|Timed out waiting \d+ ?ms for (?:recv|send) operation"  # Gloo
    r"|failed to pass monitoredBarrier"
    r"|ncclRemoteError|remote process (?:has )?exit|NCCL communicator was aborted"
    r"|Watchdog caught collective operation timeout"
    r"|Connection was likely closed\. Did the remote server"  # TCPStore
    r"|wait timeout after \d+ ?ms, keys"
    r"|MPI_ERR_PROC_FAILED|MPI_ERR_REVOKED"
)


def is_victim(kind_names: Iterable[str], message: str) -> bool:
    """Whether an error of these classes, with this text, says that a peer was gone or did not come."""
    return not _KINDS.isdisjoint(kind_names) or _TEXTS.search(message) is not None
