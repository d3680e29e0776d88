"""Classes for the ranks, calls and sizes in an error: plain data that travels between processes as JSON.

Start with `Facts`, which converts every such object, and a `Failure`, to JSON's types and back.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Any

from phalanx.wire.messages import as_facts, read_value

if typing.TYPE_CHECKING:
    from typing_extensions import Self


class Facts:
    """Base class of plain data that JSON can hold."""

    def to_facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = as_facts(self)
        return facts

    @classmethod
    def from_facts(cls, facts: object) -> Self:
        """Return the object that `to_facts` converted to `facts`, even if `facts` travelled as JSON.

        Raises:
            ValueError: `facts` is not a possible result of `to_facts`; an unknown sender may have sent it.
        """
        try:
            value: Self = read_value(facts, cls)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        return value


@dataclass(frozen=True, kw_only=True)
class Peer(Facts):
    """A rank of the world; its process and its host may be unknown.

    Attributes:
        host: Name of the rank's host; empty if all ranks of the group are on one host.
    """

    rank: int
    pid: int | None = None
    host: str = ""


@dataclass(frozen=True, kw_only=True)
class Standing(Peer):
    """State of a rank for which other ranks are waiting.

    Attributes:
        has_joined: Whether the rank has joined the group.
        waits_in: Call in which the rank is waiting, in any group; empty if the rank is not waiting.
        last: Number of the rank's last collective in the group; None if unknown.
        is_apart: Whether the rank is joining a group of a different name, of which the reporting rank is also a member.
    """

    has_joined: bool = True
    waits_in: str = ""
    last: int | None = None
    is_apart: bool = False


@dataclass(frozen=True, kw_only=True)
class Waiter(Peer):
    """A rank in a circle of ranks that wait for each other's messages.

    Attributes:
        awaits: Rank for which this rank waits: the next one in the circle.
        where: Call in which this rank waits, such as ``"recv of group 'default' at train.py:31"``.
    """

    awaits: int
    where: str = ""


@dataclass(frozen=True, kw_only=True)
class MadeCall(Peer):
    """The call that a rank made: one row in the table of a mismatch.

    Attributes:
        op: Operation; empty if the rank has made no call yet.
        dtype: Name of the tensor's dtype, without ``torch.``.
        count: Number of elements in each rank's block; None if the blocks may have different sizes.
        sizes: Number of elements in each rank's block, if they differ and are known.
        reduce_op: Name of the reduction, such as ``SUM``.
        root: Global rank of the operation's source or destination; None if the operation has no such rank.
        tag: Tag of a message.
        site: Line of the call, such as ``"train.py:31"``.
    """

    op: str = ""
    dtype: str = ""
    count: int | None = None
    sizes: tuple[int, ...] = ()
    reduce_op: str = ""
    root: int | None = None
    tag: int | None = None
    site: str = ""

    @property
    def asked(self) -> tuple[object, ...]:
        """The facts of a call on which all ranks must agree."""
        return self.op, self.dtype, self.count, self.sizes, self.reduce_op, self.root


@dataclass(frozen=True, kw_only=True)
class SizeDispute(Facts):
    """Two ranks disagree about the size of a message from `one` to `other`, or of the block that belongs to rank `of`.

    Attributes:
        one: Rank whose size is `count`.
        count: Number of elements that `one` sends, or states for the block of `of`.
        other: Rank that contradicts `one`.
        other_count: Number of elements that `other` expects, or states for the block of `of`.
        of: Global rank that owns the block; None if the sizes are those of a message.
    """

    one: Peer
    count: int
    other: Peer
    other_count: int
    of: int | None = None
