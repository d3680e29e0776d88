"""Sockets of launchers lie in a folder of their user; those of launchers that were killed do not pile up there."""

from __future__ import annotations

import os
import socket

import pytest

from phalanx.wire.places import make_path


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_sockets_whose_processes_were_killed_are_removed_and_others_are_not_disturbed(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with socket.socket(socket.AF_UNIX, kind) as living, socket.socket(socket.AF_UNIX, kind) as dead:
        for made in (living, dead):
            made.bind(make_path("prompts"))
            os.utime(made.getsockname(), (0, 0))
            made.listen()
        dead.close()
        new = make_path("survivors")
        assert len(os.listdir(os.path.dirname(new))) == 2  # of another kind
        assert os.path.dirname(make_path("prompts")) == os.path.dirname(new)
        assert os.listdir(os.path.dirname(new)) == [os.path.basename(living.getsockname())]
        living.setblocking(False)
        with pytest.raises(BlockingIOError):
            living.accept()
        with socket.socket(socket.AF_UNIX, kind) as made_now:
            made_now.bind(make_path("prompts"))
        assert len(os.listdir(os.path.dirname(make_path("prompts")))) == 2  # it may be about to listen
