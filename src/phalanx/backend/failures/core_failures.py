"""Turns failures and stalls that the core reports into Python values: codes into names, and "not known" into None."""

from __future__ import annotations

import os
import re
import weakref
from typing import Any

from phalanx._errors import Failure, PhalanxError
from phalanx._errors.facts import MadeCall, Peer, SizeDispute, Standing, Waiter
from phalanx.backend.failures.members import Members
from phalanx.backend.failures.wording import error_of, report_stall
from phalanx.backend.types import DTYPE_NAMES, ITEM_BYTES, REDUCE_NAMES

_COLLECTIVE = re.compile(r"\w+ #\d+(?= of group '(.*?)')")

_bridged: weakref.WeakValueDictionary[tuple[int, str], Members] = weakref.WeakValueDictionary()
"""Members of groups on several hosts, by process id (a forked child has groups of its own) and name of the group."""


def note_bridged(members: Members) -> None:
    """From now on, add the hosts of a group to the core's failures and to the core's stall reports about messages.

    The core's stall reports about collectives are dropped, because a group on several hosts reports these itself.
    """
    _bridged[os.getpid(), members.group] = members


def forget_bridged(members: Members) -> None:
    """Undo `note_bridged`, unless a later group of the same name has replaced this one."""
    if _bridged.get((os.getpid(), members.group)) is members:
        del _bridged[os.getpid(), members.group]


def from_core(facts: dict[str, Any]) -> PhalanxError:
    """Return the exception for a failure that the core reports."""
    return error_of(_failure_of_core(facts))


def report_core_stall(facts: dict[str, Any], waited_s: float) -> None:
    """Print which ranks an operation of the core has waited for."""
    failure = _failure_of_core(facts)
    if (members := _bridged.get((os.getpid(), failure.group))) is not None:
        if failure.seq:  # a step of a collective, which the group itself reports under the name that the user knows
            return
        failure = members.locate(failure)
    report_stall(failure, waited_s)


def _failure_of_core(facts: dict[str, Any]) -> Failure:
    names = ("kind", "rank", "group", "op", "seq", "site", "detail")
    pid = facts["pid"] or None
    return Failure(
        **{name: facts[name] for name in names},
        culprits=tuple(Peer(rank=rank, pid=pid) for rank in facts["ranks"]),
        by=Peer(rank=facts["by"]) if facts["by"] >= 0 else None,
        exit_code=facts["exit_code"] if facts["exit_code"] >= 0 else None,
        signal=facts["signal"] or None,
        standings=tuple(map(_standing_of_core, facts["standings"])),
        circle=tuple(Waiter(**waiter) for waiter in facts["circle"]),
        calls=tuple(map(_call_of_core, facts["calls"])),
        sizes=facts["sizes"] and _dispute_of_core(*facts["sizes"]),
        timeout_s=facts["timeout_s"] or None,
        size_bytes=facts["size_bytes"] or None,
        errno=facts["errno"] or None,
        cause=facts["cause"] and _failure_of_core(facts["cause"]),
    )


def _standing_of_core(facts: dict[str, Any]) -> Standing:
    waits_in = facts["waits_in"]
    if (found := _COLLECTIVE.match(waits_in)) and (
        os.getpid(),
        found[1],
    ) in _bridged:  # a step of a call that users know by another name
        waits_in = f"a collective{waits_in[found.end() :]}"
    return Standing(**{**facts, "pid": facts["pid"] or None, "waits_in": waits_in})


def _call_of_core(facts: dict[str, Any]) -> MadeCall:
    rank, op, site = facts["rank"], facts["op"], facts["site"]
    if op in ("", "join", "barrier"):
        return MadeCall(rank=rank, op=op, site=site)
    count = facts["count"]
    if facts["size_bytes"] is not None:
        count = facts["size_bytes"] // ITEM_BYTES[facts["dtype"]]
    return MadeCall(
        rank=rank,
        op=op,
        dtype=DTYPE_NAMES[facts["dtype"]],
        count=None if facts["has_splits"] else count,
        reduce_op=REDUCE_NAMES[facts["reduce_op"] - 1] if facts["reduce_op"] else "",
        root=facts["root"] if facts["root"] >= 0 else None,
        tag=facts["tag"],
        site=site,
    )


def _dispute_of_core(one: int, count: int, other: int, other_count: int, of: int) -> SizeDispute:
    of_rank = of if of >= 0 else None
    return SizeDispute(one=Peer(rank=one), count=count, other=Peer(rank=other), other_count=other_count, of=of_rank)
