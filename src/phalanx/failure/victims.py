"""Recognizes the errors of a victim: a rank that failed because a peer had left or never arrived.

Errors of phalanx have the attribute `is_victim`. This module decides about all other errors: by their class, if a rank
has left only a traceback, and by their text, if another engine's errors have no class of their own.
"""

from __future__ import annotations

import re

from phalanx._errors import KINDS
from phalanx.failure.last_words import LastWords

_OURS = {kind.__name__ for kind in KINDS.values() if kind.is_victim}
_OF_SOCKETS = {
    kind.__name__
    for kind in (ConnectionError, ConnectionResetError, ConnectionAbortedError, ConnectionRefusedError, BrokenPipeError)
}
_OF_STORES = {"DistNetworkError"}  # since torch 2.15
_KINDS = _OURS | _OF_SOCKETS | _OF_STORES

_TEXTS = {  # patterns, each with the place where it was seen
    r"closed by (?:remote )?peer": "Gloo in torch 2.15, NCCL 2.30",
    r"[Cc]onnection reset by peer|Broken pipe": "Gloo in torch 2.15, Linux",
    r"Timed out waiting \d+ ?ms for (?:recv|send) operation": "Gloo in torch 2.15",
    r"failed to pass monitoredBarrier": "torch 2.15",
    r"ncclRemoteError|remote process (?:has )?exit": "NCCL 2.30",
    r"NCCL communicator was aborted": "torch 2.15",
    r"Watchdog caught collective operation timeout": "torch 2.15",
    r"Connection was likely closed\. Did the remote server": "TCPStore in torch 2.15",
    r"wait timeout after \d+ ?ms, keys": "TCPStore in torch 2.15",
    r"MPI_ERR_PROC_FAILED|MPI_ERR_REVOKED": "ULFM in Open MPI 5.0",
}
_SAID = re.compile("|".join(_TEXTS))


def is_victim(words: LastWords) -> bool:
    """Whether these are the last words of a rank that failed only because a peer had left or failed."""
    return words.is_victim or words.name in _KINDS or _SAID.search(words.message) is not None
