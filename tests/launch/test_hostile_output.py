"""Whatever ranks print and other nodes say: no crash, no unbounded memory, nothing that moves the cursor."""

from __future__ import annotations

import contextlib
import json
import os

from hypothesis import example, given
from hypothesis import strategies as st

from phalanx.failure.ending import Ending, read_stderr
from phalanx.failure.folding import COLUMNS, ROWS
from phalanx.failure.hints import hint_for
from phalanx.failure.report import report
from phalanx.failure.tracebacks import HeldTracebacks
from phalanx.launch.nodes.causes import cause_of, ending_of
from phalanx.launch.nodes.views import Cause
from phalanx.launch.screen.output import LiveStream, Screen, printable
from phalanx.wire.messages import GarbledError, as_facts, read_value
from tests.launch.streams import Kept

MIB = 1 << 20
PIECES = st.sampled_from(
    [
        b"Traceback (most recent call last):\n", b"[rank0]: ", b'  File "x.py", line 1\n', b"ValueError: bad\n", b"\n",
        b"torch.distributed.DistBackendError: gone\n", b"\x1b[31m", b"\x1b[", b"\x1b]0;title\x07", b"\xff\xfe", b"\0",
        b"\r", b"terminate called after throwing an instance of 'a'\n  what():  b\n", b"Fatal Python error: x\n",
        b"frame #x", b"see frame #",
    ]
)  # fmt: skip
OUTPUT = st.lists(st.one_of(PIECES, st.binary(max_size=9)), max_size=30)


class Counted(Kept):
    """Keeps nothing but the number of bytes."""

    num_bytes = 0

    def feed(self, data):
        self.num_bytes += len(data)


def memory_of(view):
    return len(view._pending) + len(view._held)


def feed_much(start, block, num_blocks=160):
    """Feed a filter with `start` and many blocks; check that it keeps little, and gives on everything."""
    counted = Counted()
    view = HeldTracebacks(counted)
    view.feed(start)
    for _ in range(num_blocks):
        view.feed(block)
        assert memory_of(view) < 2 * MIB
    view.finish()
    assert counted.num_bytes == len(start) + num_blocks * len(block)


def test_a_line_without_end_in_a_traceback_is_given_on():
    feed_much(b"Traceback (most recent call last):\n  ", b"x" * 65536)


def test_a_traceback_without_end_is_given_on():
    feed_much(b"Traceback (most recent call last):\n", b"  During handling\n" * 4096)


def test_an_escape_sequence_without_end_is_given_on():
    ours, theirs = os.openpty()
    os.set_blocking(ours, False)
    stream = LiveStream(Screen(theirs), b"[rank 0] ")
    stream.feed(b"\x1b[")
    for _ in range(3):
        stream.feed(b"0" * 2048)
        assert len(stream._pending) <= 4096
    assert b"000" in os.read(ours, 65536)
    os.close(ours)
    os.close(theirs)


@given(OUTPUT)
@example([b"\r", b"frame #"])
def test_what_is_no_victims_traceback_comes_out_as_it_went_in(pieces):
    whole = b"".join(pieces)
    kept, at_once = Kept(), Kept()
    view, other = HeldTracebacks(kept), HeldTracebacks(at_once)
    for piece in pieces:
        view.feed(piece)
    other.feed(whole)
    view.finish()
    other.finish()
    if b"DistBackendError" not in whole:
        assert kept.data == at_once.data == whole


@given(OUTPUT)
@example([b"Traceback (most recent call last):\n" + b"  File x\n" * 5000 + b"A: \xff\x1b]0;x\x07\n"])
def test_any_last_words_make_a_report_that_moves_no_cursor(pieces):
    end = Ending(rank=0, pid=1, exitcode=1, last_words=read_stderr(b"".join(pieces)), folder="/folder\udcff")
    hint_for(end)
    shown = printable(report(end, [end], hint=""))
    assert not set(shown) & {0x1B, 0x07, 0x0D, 0x00}
    assert sum(max(1, -(-len(line) // COLUMNS)) for line in shown.decode().splitlines()) < ROWS
    told = json.dumps(as_facts(cause_of(end)))
    assert ending_of(read_value(json.loads(told), Cause)).describe() == end.describe()
    assert len(told) < 200_000  # of a packet


VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists)
WORDS = st.fixed_dictionaries(
    {}, optional={"kind": VALUES, "message": VALUES, "lines": st.lists(VALUES), "is_victim": VALUES, "is_told": VALUES}
)
ENDINGS = st.fixed_dictionaries(
    {"rank": VALUES, "pid": VALUES}, optional={"exitcode": VALUES, "last_words": WORDS, "host": VALUES}
)


@given(VALUES | st.fixed_dictionaries({"ending": VALUES | ENDINGS}))
@example({"ending": {"rank": 1, "pid": 2, "exitcode": -9, "last_words": {"lines": ["\x1b[2J"] * 9}, "host": "\ud800"}})
@example({"ending": {"rank": 1, "pid": 2, "exitcode": -128}})
@example({"ending": {"rank": 1, "pid": 10**400, "exitcode": 1}})
def test_whatever_a_node_tells_is_a_cause_or_refused(told):
    with contextlib.suppress(GarbledError):
        end = ending_of(read_value(told, Cause))
        printable(report(end, [end], hint=hint_for(end)))
