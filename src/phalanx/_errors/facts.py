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
        """Return an object equal to the one whose `to_facts` returned `facts`, even if they travelled as JSON.

        Raises:
            ValueError: `facts` can't come from `to_facts`; an unknown sender may have sent them.
        """
        try:
            value: Self = read_value(facts, cls)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        return value


@dataclass(frozen=True, kw_only=True)
class Peer(Facts):
    """A rank of the world, with its process and its host if they are known.

    Attributes:
        host: Name of its host; empty if all ranks of the group share one.
    """

    rank: int
    pid: int | None = None
    host: str = ""


@dataclass(frozen=True, kw_only=True)
class Standing(Peer):
    """State of a rank that others are waiting for.

    Attributes:
        has_joined: Whether it has joined the group.
        waits_in: Call in which it is waiting, in any group; empty if it is not waiting.
        last: Number of its last collective in the group; None: unknown.
        is_apart: Whether it is joining a group of another name, which includes the rank that reports this.
    """

    has_joined: bool = True
    waits_in: str = ""
    last: int | None = None
    is_apart: bool = False


@dataclass(frozen=True, kw_only=True)
class Waiter(Peer):
    """A rank in a circle of ranks that wait for each other's messages.

    Attributes:
        awaits: Next rank of the circle, for which it waits.
        where: Call in which it waits, such as ``"recv of group 'default' at train.py:31"``.
    """

    awaits: int
    where: str = ""


@dataclass(frozen=True, kw_only=True)
class MadeCall(Peer):
    """The call that a rank made: one row in the table of a mismatch.

    Attributes:
        op: Operation; empty if the rank has made no call yet.
        dtype: Name of the tensor's dtype, without ``torch.``.
        count: Number of elements in a rank's block; None if each rank passes its own sizes.
        sizes: Number of elements in each rank's block, if they differ and are known.
        reduce_op: Name of the reduction, such as ``SUM``.
        root: Global rank that sends or receives.
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
    """Two ranks disagree about a size: of a message from `one` to `other`, or of the block that belongs to rank `of`.

    Attributes:
        one: Rank whose size is `count`.
        count: Number of elements that `one` sends, or states for the block of `of`.
        other: Rank that contradicts it.
        other_count: Number of elements that `other` expects, or states for the block of `of`.
        of: Global rank that owns the block; None if the sizes are those of a message.
    """

    one: Peer
    count: int
    other: Peer
    other_count: int
    of: int | None = None
