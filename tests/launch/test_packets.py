"""Packets between a supervisor and its processes."""

from __future__ import annotations

from phalanx.wire.packets import PacketSocket


def test_what_an_end_has_said_is_heard_although_it_has_not_read_all():
    ours, end = PacketSocket.pair()
    theirs = PacketSocket(end)
    ours.send({"question": 1})
    for number in range(3):
        theirs.send({"answer": number})
    theirs.close()
    assert [packet["answer"] for packet in ours.receive()] == [0, 1, 2]
    assert not ours.alive
    ours.close()
