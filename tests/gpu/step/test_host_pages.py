"""Copies of pages in the host's memory, and their checksums."""

from __future__ import annotations

import random
import zlib

import numpy as np
import pytest
import torch

from actorium.gpu.step.host_pages import COPY_KIND, HostPages
from actorium.kernels.cpu.native_library import library

PAGES, SIZE = 50, 4


def column(rows: list[tuple[int, int]]) -> bytes:
    """rows: page and slot."""
    return np.array([(0, page, slot) for page, slot in rows], np.int32).tobytes()


@pytest.mark.parametrize("native", [False, True])
def test_a_thousand_flips_are_detected_and_no_page_with_one_is_copied(native: bool) -> None:
    torch.manual_seed(3)
    tensors = [torch.randn(PAGES * SIZE, 2, 8, dtype=torch.bfloat16) for _ in range(3)]
    tensors.append(torch.randint(-9, 9, (PAGES * SIZE, 6), dtype=torch.int8))
    width = SIZE * (3 * 32 + 6)
    host = HostPages([[own.view(1, PAGES, -1) for own in tensors]], width * PAGES + 1,
                     native=native)
    assert host.slots == PAGES and host.data.shape == (PAGES, width)
    before = [own.clone() for own in tensors]
    everything = [(i, PAGES - 1 - i) for i in range(PAGES)]
    assert host.begin(column(everything), b"")() == b""
    back = everything
    dice = random.Random(5)
    for _ in range(20):  # of 50 flips each
        for own in tensors:
            own.zero_()
        flips = [(slot, dice.randrange(width), 1 << dice.randrange(8)) for slot in range(PAGES)]
        for slot, at, bit in flips:
            host.data[slot, at] ^= bit
        lost = np.frombuffer(host.begin(b"", column(back))(), np.int32)
        assert sorted(lost.tolist()) == list(range(PAGES))
        assert not any(own.any() for own in tensors)
        for slot, at, bit in flips:
            host.data[slot, at] ^= bit
    assert host.begin(b"", column(back))() == b""
    assert all(torch.equal(own, old) for own, old in zip(tensors, before, strict=True))


def test_checksums_of_the_c_kernel_are_zlibs() -> None:
    """At every length around its blocks, and wherever the bytes begin."""
    lib = library()
    if lib is None:
        pytest.skip("no C kernels here")
    data, dice = np.random.default_rng(1).integers(0, 256, 70_000, np.uint8), random.Random(2)
    found, host = np.zeros(1, np.uint32), HostPages([[torch.zeros(1, 1, 8)]], 32)
    lengths = [*range(300), *(dice.randrange(len(data) - 64) for _ in range(100))]
    for length in lengths:
        own = data[(begin := dice.randrange(64)):begin + length]
        lib.crc_of(own.ctypes.data, length, found.ctypes.data)
        assert int(found[0]) == zlib.crc32(own) == host.crc32(own.data), length


@pytest.mark.parametrize("native", [False, True])
def test_things_of_several_parts_come_back_as_they_were(native: bool) -> None:
    """Groups of other widths and checkpoints, whose parts end in the middle of a tensor; rows that
    are not copied stay."""
    if native and library() is None:
        pytest.skip("no C kernels here")
    torch.manual_seed(4)
    kinds = [[torch.randint(-9, 9, (6, width), dtype=torch.int8) for width in widths]
             for widths in ((40, 24), (130,), (64, 7, 200))]
    host = HostPages([[own[None] for own in tensors] for tensors in kinds], 64 * 40,
                     native=native)
    assert (host.width, host.parts) == (64, [1, 3, 5])
    before = [[own.clone() for own in tensors] for tensors in kinds]
    dice, slots = random.Random(6), list(range(host.slots))
    dice.shuffle(slots)
    copied = [(kind, number) for kind in range(3) for number in (1, 3, 4)]
    rows = np.array([(kind * COPY_KIND + part, number, slots.pop()) for kind, number in copied
                     for part in range(host.parts[kind])], np.int32)
    host.rows[:] = 255
    assert host.begin(rows.tobytes(), b"")() == b""
    assert host.sums[rows[:, 2]].tolist() == [zlib.crc32(host.rows[slot]) for slot in rows[:, 2]]
    for tensors in kinds:
        for own in tensors:
            own.zero_()
    host.rows[rows[2, 2], 5] ^= 1  # of the third page of the first kind
    assert np.frombuffer(host.begin(b"", rows.tobytes())(), np.int32).tolist() == [rows[2, 2]]
    for kind, (tensors, old) in enumerate(zip(kinds, before, strict=True)):
        for own, was in zip(tensors, old, strict=True):
            back = [number for number in (1, 3, 4) if (kind, number) != (0, 4)]
            assert torch.equal(own[back], was[back])
            assert not own[[n for n in range(6) if n not in back]].any()
