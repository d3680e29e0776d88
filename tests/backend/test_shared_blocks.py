"""Memory that several processes of a host map: handed over, sealed, counted, freed by its last user."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import pytest

from phalanx.host import shared_blocks
from phalanx.host.shared_blocks import Address, Block, held_bytes
from tests.limited import limited_files

READER = """
import json, sys
from phalanx.host.shared_blocks import Address, Block
block = Block.open(Address(*json.loads(sys.argv[1])), "of-a-peer")
block.memory[0] += 1
print("ready", flush=True)
sys.stdin.readline()
print(block.memory[0], block.memory[-1], flush=True)
"""


def refused(call):
    """Return the error of a call. Its traceback, and pytest's own record of it, would keep the caller's blocks."""
    try:
        call()
    except OSError as error:
        return error.with_traceback(None)
    pytest.fail("nothing was refused")


def test_a_process_that_mapped_a_block_keeps_it_after_its_owner_has_closed_it():
    block = Block.create(4 << 20, "test")
    address = json.dumps(block.address)
    with subprocess.Popen(
        [sys.executable, "-c", READER, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout.readline() == "ready\n"
        assert block.memory[0] == 1  # both see the same pages
        block.memory[0], block.memory[-1] = 41, 7
        block.close()
        block.memory.close()
        assert reader.communicate("go on\n")[0] == "41 7\n"
    assert reader.returncode == 0


def test_a_block_that_its_owner_has_closed_or_never_had_can_not_be_opened():
    block = Block.create(1 << 16, "test")
    address = block.address
    for other in (
        address._replace(inode=address.inode + 1),
        address._replace(size_bytes=1),
        address._replace(fd=0),
        address._replace(fd=10**6),
        address._replace(pid=2**22 + 1),  # beyond the largest pid
    ):
        error = refused(lambda other=other: Block.open(other, "test"))
        assert error.errno in (errno.ESTALE, errno.ENOENT, errno.EINVAL, errno.EACCES), error
    block.close()
    assert refused(lambda: Block.open(address, "test")).errno in (errno.ENOENT, errno.ESTALE)


def test_the_size_of_a_block_is_sealed():
    block = Block.create(1 << 16, "test")
    fd = os.open(shared_blocks.path_of(block.address.fd), os.O_RDWR)
    try:
        for size_bytes in (0, 1 << 17):
            assert refused(lambda size_bytes=size_bytes: os.ftruncate(fd, size_bytes)).errno == errno.EPERM
    finally:
        os.close(fd)


def test_memory_that_is_not_there_is_an_error_before_anybody_uses_it():
    assert refused(lambda: Block.create(1 << 50, "test")).errno == errno.ENOMEM
    with limited_files(1 << 16):
        assert refused(lambda: Block.create(1 << 17, "test")).errno == errno.EFBIG
    assert "test" not in held_bytes()


def test_blocks_are_counted_by_purpose_until_nothing_maps_them():
    mine, other = Block.create(1 << 16, "of-mine"), Block.create(1 << 15, "of-mine")
    again = Block.open(mine.address, "of-a-peer")
    assert (held_bytes()["of-mine"], held_bytes()["of-a-peer"]) == (3 << 15, 1 << 16)
    mine.close()
    assert held_bytes()["of-mine"] == 3 << 15  # still mapped
    del mine, other, again
    assert not {"of-mine", "of-a-peer"} & held_bytes().keys()


def test_an_address_crosses_processes_as_json():
    block = Block.create(1, "test")
    assert Address(*json.loads(json.dumps(block.address))) == block.address
