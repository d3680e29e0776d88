"""Names of publications that no other test and no other run of the tests has."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator

from phalanx.checkpoint.publication import records
from phalanx.wire.places import common_files


@contextlib.contextmanager
def new_name() -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex}"
    yield name
    for path in common_files(records.file_name(name)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
