"""A host has one name for people, which PHALANX_HOST may set."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import phalanx
from phalanx import _env
from phalanx.diagnose.top.top import as_json
from phalanx.failure.last_words import LastWords

PACKAGE = Path(phalanx.__file__).parent
ASKS_THE_SYSTEM = {  # what is about the machine itself, whatever people call it
    "_env.py",
    "host/network.py",
    "doctor/doctor.py",
    "doctor/examination.py",
    "doctor/network.py",
}


def test_what_people_read_names_the_host_as_it_was_called(monkeypatch):
    monkeypatch.setenv("PHALANX_HOST", "left")
    monkeypatch.setenv("PHALANX_NO_SUCH_SETTING", "1")  # a mistake in another variable does not hide last words
    assert (_env.host_name(), LastWords().record(0, 1)["host"], json.loads(as_json([]))["host"]) == ("left",) * 3
    monkeypatch.delenv("PHALANX_HOST")
    assert _env.host_name() == socket.gethostname()


def test_no_other_module_asks_the_system_for_the_name():
    asking = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"gethostname\(", path.read_text())
    }
    assert asking == ASKS_THE_SYSTEM
