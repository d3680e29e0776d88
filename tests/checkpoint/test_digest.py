"""The digest by which ranks compare their state: XXH3's bits, with any number of threads."""

from __future__ import annotations

import pytest
import torch

from phalanx import _core

# Size in bytes and XXH3_128bits() of the bytes (i * i * 31 + i * 7 + size) % 256, from xxHash 0.8.3.
KNOWN = {
    241: 0x606FCEDABB00503DF6ECCCEB68535F08,
    255: 0x29B85AFD9066C8E99190C6B90CE4D274,
    256: 0x7FCDF4A64774A6AA2D280775D960610D,
    320: 0xE85250B64558202A56D447C8B7F5FEF1,
    1023: 0xCDE9891A780EA32AA2DB9448F83BE699,
    1024: 0x001103A186177873DF9DE2EBC1670AC5,
    1025: 0xF2179DADB0D65B35F14FF968D7318F7F,
    1088: 0x7D0EA9ACCD14E1030605BD30C7C6D273,
    65536: 0x1882161665EFED66093EBD504E602118,
    65537: 0xB247466232CB4996F3DB04BBCE425199,
    100003: 0x028867C85A95532E54C2D005ACCC6F8E,
}


def data_of(size):
    i = torch.arange(size)
    return ((i * i * 31 + i * 7 + size) % 256).to(torch.uint8)


def digest(tensor):
    return _core.digests([tensor.data_ptr()], [len(tensor)], 1)


@pytest.mark.parametrize("size", KNOWN)
@pytest.mark.parametrize("shift", [0, 1])
def test_it_is_that_of_xxh3(size, shift):
    tensor = torch.empty(size + shift, dtype=torch.uint8)[shift:].copy_(data_of(size))  # aligned, and not
    assert int.from_bytes(digest(tensor), "little") == KNOWN[size]


def test_each_bit_counts():
    tensor = data_of(4097)
    seen = {digest(tensor)}
    for i in range(len(tensor)):
        for bit in range(8):
            tensor[i] ^= 1 << bit
            seen.add(digest(tensor))
            tensor[i] ^= 1 << bit
    assert len(seen) == 8 * len(tensor) + 1


@pytest.mark.parametrize("num_threads", [1, 2, 5, 64])
def test_the_number_of_threads_changes_nothing(num_threads):
    pieces = [data_of(size) for size in KNOWN]
    got = _core.digests([p.data_ptr() for p in pieces], [len(p) for p in pieces], num_threads)
    assert got == b"".join(map(digest, pieces))


def test_a_piece_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match="too short"):
        digest(data_of(240))
